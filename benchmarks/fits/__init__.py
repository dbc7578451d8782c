"""Buffers that are known to fit into a capacity: how many sets are laid out within it, and how soon."""
