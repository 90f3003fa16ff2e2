"""Real nodes, servers, proxies and their files, started and ended by tests."""
