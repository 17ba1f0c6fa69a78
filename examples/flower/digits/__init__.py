"""Federated continual learning of the digits 0 and 1, then 2 and 3, and so on."""
