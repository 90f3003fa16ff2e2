"""The connection to a lock server: gRPC streams and unary calls."""
