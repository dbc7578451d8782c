"""The landed bytes of gradients: what arrives in them, who reads them, what is still to be done to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import torch

from forebay.device.base import Completion
from forebay.device.completions import dependency_failure
from forebay.errors import ForebayError
from forebay.model import Parameter
from forebay.runtime.deferred import Deferred
from forebay.runtime.landing import Landing
from forebay.runtime.norms import Norms
from forebay.runtime.spent import gradient_used_up
from forebay.runtime.tensors import flat, shaped

__all__ = ["GradientBuffer"]

_NONE: Final = -1
"""What torch calls the backward of a thread that is in none."""


@final
class GradientBuffer:
    """The landed bytes of one parameter's gradient: ``host`` (1-D, the parameter's dtype) in the gradient arena. None:
    it has a place there only from ``lend`` until it is used up.

    ``arrived`` is the last job that writes the bytes, ``read_by`` the update that reads them. ``generation`` counts
    the gradients that have landed here: a wrapper that somebody kept must not pass the next one off as its own.
    ``version`` is raised by whatever may change the bytes: who has read them at one version knows them until the next.
    ``landings`` counts what has landed since the buffer was empty, or zeroed, or an optimizer step took what was there.
    ``deferred`` is the update that is going to read the bytes and is not queued yet. ``waiting``: a step has taken what
    has landed, and its update is still to come (``runtime.waiting``). ``adds_up``: what has landed is a sum with what
    had waited. A *factor* may be due, which clipping asks for (``scale``): the bytes are multiplied by it before
    anybody reads them, and by the update, if that is the first to (``optim.scaling``).
    """

    def __init__(
        self, parameter: Parameter, host: torch.Tensor | None, landing: Landing, deferred: Deferred | None = None
    ) -> None:
        self.parameter = parameter
        self._host = host
        self._whole: torch.Tensor | None = None
        self.passes: Final = host is None
        self._free: tuple[Completion, ...] = ()
        self.arrived: Completion | None = None
        self.read_by: Completion | None = None
        self.generation = 0
        self.version = 0
        self.landings = 0
        self.waiting = self.adds_up = False
        self._factor: float | None = None
        self._backward = _NONE
        self._landing = landing
        self._deferred = deferred or Deferred()
        # Where others' gradients land next, nothing may read a norm behind the update's back.
        self._norms = Norms(landing.device if landing.norms_ahead and not self.passes else None)

    @property
    def host(self) -> torch.Tensor:
        """The landed bytes. Raises ``GradientUsedUp`` where they have no place."""
        if self._host is None:
            raise self.gone()
        return self._host

    @property
    def whole(self) -> torch.Tensor:
        """The landed bytes in the shape of the parameter: one view for as long as they have their place."""
        if self._whole is None:
            self._whole = shaped(self.host, self.parameter)
        return self._whole

    def gone(self) -> ForebayError:
        """What is said to whoever asks for a gradient that is no longer here."""
        if self.passes:
            return gradient_used_up(self.parameter.name)
        return ForebayError(
            f"this gradient of {self.parameter.name} is that of an earlier backward and its bytes were overwritten by "
            f"the next; to keep a gradient, clone() it before zero_grad()"
        )

    def lend(self, host: torch.Tensor, free: tuple[Completion, ...]) -> None:
        """The gradient has its place at ``host``, whose last reader is done when ``free`` are."""
        self._host, self._free, self._whole = host, free, None

    def use_up(self) -> None:
        """The update that reads the bytes is queued; their place is another's from now on, behind that update."""
        self._host, self._free, self._whole = None, (), None
        self.arrived = self.read_by = None
        self.landings = 0
        self.generation += 1  # who holds the gradient must not take the next one's bytes for it

    def land(self, gradient: torch.Tensor) -> None:
        """Replaces the landed bytes by ``gradient``."""
        self._before_write()
        self._factor = None
        self.generation += 1
        self.landings = 1
        target, source = self.whole, gradient
        if not source.is_contiguous() or source.stride() != self.parameter.stride:
            target, source = self.host, flat(gradient, self.parameter)
        self._arrives(self._landing.copy(target, source, self.parameter.name, self._free))

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Adds ``gradient`` to the landed bytes, in the parameter's dtype as autograd would on the device."""
        self._before_write()
        self.multiply()
        self.landings += 1
        source = flat(gradient, self.parameter)
        self._arrives(self._landing.accumulate(self.host, source, self.parameter.name))

    def norm(self, op: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> torch.Tensor:
        """``op(gradient, *args)``, a norm of what has landed."""
        self.settle()
        return self._norms.of(self.whole, self.landings, self.version, op, args)

    def scale(self, factor: float) -> None:
        """Multiplies the landed bytes by ``factor``, an fp32 number, as ``mul_`` does: when they are read. What the
        gradient was until now is not waited for; the update that reads the product is queued behind who reads that."""
        self.multiply()  # two products are rounded twice
        self.version += 1
        self._norms.settle()
        self._deferred.now()
        self._factor = factor

    @property
    def factor(self) -> float | None:
        """What the bytes must be multiplied by before they are read; None: by nothing."""
        return self._factor

    def multiplied_by(self, job: Completion) -> None:
        """``job`` is queued, which multiplies the bytes by the factor that is due."""
        self.arrived, self._factor = job, None

    def multiply(self) -> None:
        """If a factor is due, waits until the landed bytes are there, and multiplies them."""
        if self._factor is not None:
            self.settle()

    def settle(self) -> None:
        """Waits until the landed bytes are there, and multiplies them if a factor is due."""
        if self.arrived is not None:
            self.arrived.wait()
            self.arrived = None
        if self._factor is not None:
            self._settle_reader()
            self.host.mul_(self._factor)
            self._factor = None

    def settle_for_write(self) -> None:
        """Like ``settle``, for a caller that is going to change them."""
        self._before_write()
        self.settle()

    def _arrives(self, arrived: Completion) -> None:
        self.arrived = arrived
        self._norms.landed(self.whole, self.landings, self.version, arrived, self.parameter.name)
        # autograd gives once in a backward, what nobody else has. What comes outside of one, or as the second in one
        # (from a hook), is a caller's own tensor, which may change as soon as the call is over.
        backward = torch._C._current_graph_task_id()
        if backward in (_NONE, self._backward):
            dependency_failure(arrived)  # of one that failed whoever reads the bytes is told
        self._backward = backward

    def _before_write(self) -> None:
        self.version += 1
        self._norms.settle()
        self._deferred.now()
        self._settle_reader()

    def _settle_reader(self) -> None:
        # An update, that of the last step or one ahead of the next, may not have read these bytes yet. One that failed
        # reads nothing more: its error is for whoever needs what it should have made, not for a gradient that lands.
        if self.read_by is not None:
            dependency_failure(self.read_by)
            self.read_by = None
