"""The contract in Python: generated messages and stubs, and how an error travels in a gRPC status."""
