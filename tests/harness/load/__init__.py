"""Callers that put load on a real server, and record what they were told."""
