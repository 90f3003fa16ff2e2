"""Waiting: the queue of each resource, its limits, and the watch over the hold in the way."""
