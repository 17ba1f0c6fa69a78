"""The leaderboard: every method that a track allows, under one protocol, and where a run of one's own stands."""
