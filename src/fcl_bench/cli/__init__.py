"""The four commands: their arguments, their output and their exit codes."""
