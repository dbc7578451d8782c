"""When ops are looked at: in the passes that the vigil has seen, and between passes for uses of what is away."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import final

from torch import nn

from forebay.device.base import Watch
from forebay.memory import Kind
from forebay.runtime.vigil import Vigil, VigilPolicy

__all__ = ["Lookout"]


@final
class Lookout:
    """Has ``watch`` look on or rest, pass by pass. ``parameters`` are those of the model; ``away``: some of them are
    elsewhere between passes, where each use of one is refused."""

    def __init__(self, watch: Watch, parameters: Mapping[str, nn.Parameter], *, away: bool) -> None:
        self._watch = watch
        self._parameters = parameters
        self._away = away
        self._vigil = Vigil(VigilPolicy())
        self._seen = False

    def begins(self, shape: Hashable, *, training: bool) -> bool:
        """A pass on a batch of ``shape`` begins; returns whether it is seen. If it is, gradients are counted, too, that
        passes have left that nobody looked at."""
        self._seen = self._vigil.begins(shape, training=training)
        self.goes_on()
        if self._seen:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    self._watch.count(parameter.grad, Kind.GRADIENT)
        return self._seen

    def goes_on(self) -> None:
        """The pass goes on, maybe in another thread than before."""
        if self._seen:
            self._watch.install()
            self._watch.activate(True)
        else:
            self._watch.uninstall()

    def rests(self) -> None:
        """What is made from here on is no step's."""
        self._watch.activate(False)

    def step_ended(self) -> None:
        """The next pass is the first of another step."""
        self._vigil.step_ended()

    def between_passes(self) -> None:
        """No op is a step's until the next pass begins. Where parameters are away, a use of one is refused meanwhile,
        also after a pass that nobody looked at; it is refused in the calling thread."""
        self._watch.activate(False)
        if self._away:
            self._watch.install()
