"""The three commands: their arguments, their output and their exit codes."""
