"""Pure functions on tensors, shared by the methods."""
