"""Redis on the wire: how to dial a node, and the Lua scripts that run on it."""
