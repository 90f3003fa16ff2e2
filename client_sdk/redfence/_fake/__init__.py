"""The lock server in memory behind `redfence.testing`."""
