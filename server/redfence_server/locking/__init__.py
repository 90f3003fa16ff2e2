"""The algorithm: mint, decide on a quorum, commit, undo."""
