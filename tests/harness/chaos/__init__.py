"""Real servers, nodes, storage and clients as processes, faults that injection them, and a judge of what the clients were told."""
