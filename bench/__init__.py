"""Contains the benchmarks; each module prints its figures and never fails on a number."""
