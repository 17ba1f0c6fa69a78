"""Clients in other processes: what both ends say to each other, whatever carries it."""
