"""Frozen backbones, the forward pass over a data set, and its cache on disk."""
