"""Every architecture of transformers, made tiny and trained in as little memory as it needs, beside plain PyTorch."""
