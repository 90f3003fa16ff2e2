"""Time in tests: virtual loops, moved clocks, measured stalls, deadlines."""
