"""Nodes that a server starts itself: the program, its process, its data directory."""
