"""Optimizers: the update rules that run wherever the states are, and the ``torch.optim.Optimizer`` in front of them.

``AdamW``, ``Lion`` and ``Adafactor`` are forebay's own: ordinary optimizers with states of few bytes, for
plain PyTorch and (but for Adafactor) for ``forebay.prepare``.
"""

from forebay.optim.adafactor import Adafactor
from forebay.optim.adamw import AdamW
from forebay.optim.lion import Lion

__all__ = ["Adafactor", "AdamW", "Lion"]
