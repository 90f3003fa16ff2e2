"""Hostile bytes and random commands for every method and script."""
