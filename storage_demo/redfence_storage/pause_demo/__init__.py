"""Shows with real processes what the late write of a paused lock holder does, with and without fencing."""
