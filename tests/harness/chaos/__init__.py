"""Injects faults into real servers, nodes, storage and clients, and records what the clients were told."""
