"""Decides, without I/O, what a client sends, when it sends it, and what each answer means for a lease."""
