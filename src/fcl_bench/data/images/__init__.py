"""Images as they are stored, decoded and batched."""
