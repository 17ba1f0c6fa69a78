"""fcl-bench: federated continual learning methods under one split, one ledger and one set of tables."""

__version__ = "0.1.0"
