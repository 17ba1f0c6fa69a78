"""Clients that do not answer, answer late or leave for good: simulated, from the seed."""
