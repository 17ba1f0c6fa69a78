"""Variational autoencoders, one for each class, trained and evaluated side by side."""
