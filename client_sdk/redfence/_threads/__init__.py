"""Implements the client for threads."""
