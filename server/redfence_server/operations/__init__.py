"""What an operator does to a cluster: form it, replace a node, recover it."""
