"""Connects a client to a lock server: one gRPC stream, and unary calls beside it."""
