"""Training steps of models: what allocators reserve for them, how low addresses lie, which order of ops takes least."""
