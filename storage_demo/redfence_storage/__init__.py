"""The storage demo: a key-value store that refuses stale fencing tokens. Start at `store`; callers want `client`."""
