"""The algorithm: mint on all nodes, decide on a quorum, commit, undo."""
