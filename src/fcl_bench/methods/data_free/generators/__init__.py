"""Networks that make up features or images, for methods that replay or distil."""
