"""The time of each stage, compared with the bare products that it can't avoid and with plain code for the same."""
