"""A gRPC server on the event loop, without gRPC's own threads: libnghttp2 speaks HTTP/2."""
