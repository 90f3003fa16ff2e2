"""The gRPC services: requests in, replies and streams out. It decides nothing."""
