"""Membership: which process may vote at which node index."""
