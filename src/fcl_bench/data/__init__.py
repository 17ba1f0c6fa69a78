"""Data sets, and how their samples are divided over time (stream) and over clients (partition)."""
