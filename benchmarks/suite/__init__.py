"""How long each stage takes beside the bare products that it can't avoid, and beside plain code for the same."""
