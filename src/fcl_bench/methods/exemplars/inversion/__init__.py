"""Gradients of single samples, and what a server makes of them: labels, images, and a choice among models."""
