"""The redfence lock server."""
