"""Measurements; each module prints its figures and fails on none."""
