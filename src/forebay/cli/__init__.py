"""The command line: one verb, one function."""
