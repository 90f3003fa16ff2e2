"""Implements the client for asyncio."""
