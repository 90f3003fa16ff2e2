"""The decisions of the SDK, without I/O: what to send, when, and what an answer means for a lease."""
