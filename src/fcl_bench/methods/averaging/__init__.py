"""Federated averaging, and what corrects or weighs its updates."""
