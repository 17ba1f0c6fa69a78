"""One autoencoder per class."""
