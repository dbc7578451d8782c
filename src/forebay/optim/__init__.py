"""Optimizers: the update rules that run wherever the states are, and the ``torch.optim.Optimizer`` in front of them.

``AdamW``, ``Lion``, ``Adafactor`` and ``Muon`` are forebay's own: ordinary optimizers, most of them with states of few
bytes, for plain PyTorch and for ``forebay.prepare``.
"""

from forebay.optim.adafactor import Adafactor
from forebay.optim.adamw import AdamW
from forebay.optim.lion import Lion
from forebay.optim.muon import Muon, muon_groups

__all__ = ["Adafactor", "AdamW", "Lion", "Muon", "muon_groups"]
