"""Experiment trackers that a run can report to: off by default, and never part of its result."""
