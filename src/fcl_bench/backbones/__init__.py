"""Networks: frozen feature extractors, and networks to train."""
