"""Space: which client holds which samples of a task."""
