"""One run, from settings to a run folder."""
