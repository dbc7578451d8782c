"""The hyperparameters of a step of Adafactor, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AdafactorStep"]


@dataclass(frozen=True)
class AdafactorStep:
    """The hyperparameters of a step, counted from 1, in the names of ``torch.optim.Adafactor``. Where ``lr`` is another
    number than Python's, a tensor without a dimension, what is made of it is rounded as it is."""

    step: int
    lr: float
    beta2_decay: float
    eps1: float
    eps2: float
    d: float
    weight_decay: float

    @property
    def fresh(self) -> float:
        """The share of the new squares in the second moment."""
        return float(self.step**self.beta2_decay)

    def pace(self, norm: float, moved: float, count: int) -> float:
        """What the update is multiplied by: the ``norm`` of the parameter and the one of its update, ``moved``, both of
        ``count`` elements. Operations in torch's order: the last bit of the product follows from them."""
        scale = max(self.eps2, norm / count**0.5) * min(self.lr, 1 / self.step**0.5)
        return float(-scale / max(1.0, moved / (count**0.5 * self.d)))
