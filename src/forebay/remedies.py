"""What would fit instead of a plan that was refused. No torch, and nothing of forebay above it."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Remedy"]


@dataclass(frozen=True)
class Remedy:
    """One change with which a plan that was refused would fit, ``words`` says it to the user.

    ``what`` is ``device``, ``host`` or ``disk`` (a larger budget), ``machine`` (one that has more of a tier, for this
    one has less than that), ``batch`` (a smaller batch or a shorter sequence, ``share`` of the one asked for),
    ``blocks`` or ``tile`` (smaller ones), ``update`` (in backward), ``optimizer`` (one with fewer states, named
    ``optimizer``) or ``policy`` (another one, named ``policy`` where it is one). ``needed`` and ``allowed`` are bytes.
    ``estimate`` says that the figure was not computed for that very change. ``at_once`` is what is asked for with it:
    the one without the others does not do.
    """

    what: str
    needed: int
    allowed: int
    words: str
    estimate: bool = False
    share: float = 1.0
    optimizer: str = ""
    policy: str = ""
    at_once: tuple[Remedy, ...] = ()

    def together_with(self, others: tuple[Remedy, ...]) -> Remedy:
        """The same with ``others``, which it asks for at once."""
        words = " and at once ".join((self.words, *(other.words for other in others)))
        return replace(self, words=words, at_once=(*self.at_once, *others))
