"""Time: which samples form task t."""
