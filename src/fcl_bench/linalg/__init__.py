"""Pure functions on tensors that methods share."""
