"""Implements the in-memory lock server of `redfence.testing`."""
