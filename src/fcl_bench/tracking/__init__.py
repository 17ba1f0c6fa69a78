"""Other people's experiment trackers, fed by a run: off by default, and never a part of its result."""
