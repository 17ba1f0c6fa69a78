"""What trains beside the frozen weights of a vision transformer: prompts, and low-rank updates."""
