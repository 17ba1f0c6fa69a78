"""Prompts and low-rank updates inside a frozen vision transformer, and models merged by regression."""
