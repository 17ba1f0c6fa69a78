"""Secure sums: the server learns the sum of a round's uploads, and no upload (Bonawitz et al., 2017)."""
