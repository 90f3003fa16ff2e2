"""Defines where servers listen, and where clients look for them, unless they are told otherwise."""

from __future__ import annotations

LOCK_SERVER = "127.0.0.1:50051"
STORAGE = "127.0.0.1:50052"
