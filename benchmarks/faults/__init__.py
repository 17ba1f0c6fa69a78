"""Faults on purpose: what the program must survive, tried one after the other (`make faults`)."""
