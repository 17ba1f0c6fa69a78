"""Check the measured numbers of README, docs and results: each has a command, and the command gives it."""
