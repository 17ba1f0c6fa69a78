"""Deliberate faults that the program must survive, tried one after the other (`make faults`)."""
