"""Serve gRPC on the event loop, without gRPC's own threads: libnghttp2 reads and writes HTTP/2.

`server` has the ports and the drain, `connection` takes bytes in, `output` sends bytes. `call` starts and
ends one call; `context` is what a servicer sees of it. `wire` is gRPC's framing, and `liveness` decides pings
and idle time; both are pure. `settings` has the types of the limits; LIMITS in api/serving.py has the
numbers.
"""
