"""A run's own pictures."""
