"""Implements a key-value store that refuses stale fencing tokens. Start at `store`; callers use `client`."""
