"""Sweeps: jobs that report, workers that share the machine, and the parent process that watches them."""
