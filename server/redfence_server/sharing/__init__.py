"""Share the server fairly between peers: turns to begin commands, memory, connections, and new names."""
