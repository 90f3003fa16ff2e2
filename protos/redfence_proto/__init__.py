"""The contract in Python: generated messages and stubs, how an error travels in a gRPC status, and what callers may type and send."""
