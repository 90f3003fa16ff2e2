"""Metrics: what a server counts, and the HTTP port on which Prometheus and probes read it."""
