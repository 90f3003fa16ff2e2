"""The console script `redfence`, and the commands that need the SDK alone."""
