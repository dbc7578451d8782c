"""Addresses: how low layouts are, and how long they take to find."""
