"""Subcommands of the console script `redfence` that come with the storage; each is loaded when it is asked for."""
