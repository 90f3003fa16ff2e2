"""The critique of locks with a timeout, played with real processes: a paused holder, and what becomes of its late write."""
