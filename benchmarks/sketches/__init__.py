"""Variants of the centred sketch, side by side: what `sketch_variants.py` runs."""
