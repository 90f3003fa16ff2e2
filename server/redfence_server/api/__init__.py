"""The gRPC services: requests in, replies and streams out. This room decides nothing."""
