"""Optimizers: the update rules that run wherever the states are, and the ``torch.optim.Optimizer`` in front of them."""
