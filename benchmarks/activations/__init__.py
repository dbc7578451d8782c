"""What can be done to a saved activation, and how fast."""
