"""Loads a server for long at one pace and judges whether its memory or its open files grow."""
