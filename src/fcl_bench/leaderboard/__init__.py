"""A track's leaderboard: every method under one protocol."""
