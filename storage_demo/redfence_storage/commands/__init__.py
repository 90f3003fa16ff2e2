"""Contains the `redfence` subcommands of the storage."""
