"""Noise on uploads: how large it has to be, how it is added, and what it guarantees."""
