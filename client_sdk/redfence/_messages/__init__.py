"""The contract in Python: requests to send, and reports for callers."""
