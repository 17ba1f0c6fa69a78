"""What the author of a method reads: messages, the two halves of a method, tasks, problems."""
