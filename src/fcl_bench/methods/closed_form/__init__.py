"""Methods that solve for a linear classifier on frozen features."""
