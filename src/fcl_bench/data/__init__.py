"""Where samples come from, how they are cut over time (stream) and over clients (partition)."""
