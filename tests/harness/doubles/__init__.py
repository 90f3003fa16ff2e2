"""Doubles of nodes, servers and the storage; contract tests hold each to the real thing."""
