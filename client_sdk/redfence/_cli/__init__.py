"""Implements the console script `redfence` and the commands that need only the SDK."""
