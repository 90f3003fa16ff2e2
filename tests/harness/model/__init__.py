"""The algorithm searched and walked: adversary, mutants, Spin."""
