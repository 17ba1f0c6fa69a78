"""The loop over tasks, rounds and clients; what crosses the wire; what it costs."""
