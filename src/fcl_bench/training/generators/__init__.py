"""Networks that make samples up, for methods that replay or distil: of features, and later of images."""
