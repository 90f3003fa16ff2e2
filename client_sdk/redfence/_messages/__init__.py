"""Converts between the contract's messages and Python values: requests to send, and reports for callers."""
