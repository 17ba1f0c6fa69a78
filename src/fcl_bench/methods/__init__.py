"""One file per method, readable next to its paper; `base` is what they all implement."""
