"""Federated averaging whose clients are held to an earlier model by what it answers."""
