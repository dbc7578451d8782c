"""Text files, made into batches of tokens."""
