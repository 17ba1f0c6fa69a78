"""Variational autoencoders, one for each class, trained and asked side by side."""
