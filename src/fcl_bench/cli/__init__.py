"""The three commands: what a user types, and what each way of ending looks like."""
