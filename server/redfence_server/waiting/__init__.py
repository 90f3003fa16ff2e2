"""Waiting: the queue of each resource, its limits, and the watch over the blocking hold."""
