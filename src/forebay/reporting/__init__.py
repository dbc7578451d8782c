"""What a run was promised and what it did: the record, and its table."""
