"""What a step needs, found out without running it: no memory, no GPU, no weights."""
