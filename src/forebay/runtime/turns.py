"""Functions in threads of their own that take turns: one of them runs, or the caller does, never two at once.

Each has a stack and what torch keeps for each thread: saved-tensor hooks, dispatch modes, the numbering of autograd's
nodes. What else torch keeps for each thread it takes over from the caller: whether gradients are recorded, autocast,
the default device, the current CUDA stream; and Python's context variables.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Generic, TypeVar, final

import torch

from forebay.device.turn import Cancelled

__all__ = ["Settings", "Turns"]

Result = TypeVar("Result")


@final
class Turns(Generic[Result]):
    """``function`` in a thread of its own, which begins with the first ``go_on``."""

    def __init__(self, function: Callable[[], Result], device: torch.device, name: str) -> None:
        context, settings = contextvars.copy_context(), Settings(device)
        self._function = function
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._cancelled = False
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self.ended = False
        self.begun = False
        # A daemon: should the caller be interrupted a second time while it waits here, Python can still exit.
        self._thread = threading.Thread(target=context.run, args=(self._run, settings), name=name, daemon=True)

    def go_on(self) -> None:
        """Runs until the function gives its turn back, or ends. Raises what the function has raised."""
        if self.begun:
            self._go.release()
        else:
            self._thread.start()
            self.begun = True
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def give_back(self) -> None:
        """Called by the function: the caller goes on, until the next turn. Raises ``Cancelled`` if there is none."""
        self._back.release()
        self._go.acquire()
        if self._cancelled:
            raise Cancelled

    def take(self) -> Result:
        """What the function has returned, once; it has ended."""
        return self._result.pop()

    def cancel(self) -> None:
        """Ends the function at its next ``give_back``, and waits for the end of its thread."""
        self._cancelled = True
        if self.begun:
            self._go.release()
            self._thread.join()
        self._result.clear()
        self._error = None

    def _run(self, settings: Settings) -> None:
        try:
            with settings.applied():
                self._result.append(self._function())
        except BaseException as error:  # the caller's to handle, whatever it is
            self._error = error
        finally:
            self.ended = True
            self._back.release()


@final
class Settings:
    """What the calling thread has set."""

    def __init__(self, device: torch.device) -> None:
        self._records = torch.is_grad_enabled()
        self._casts = [
            (kind, torch.get_autocast_dtype(kind)) for kind in {"cpu", device.type} if torch.is_autocast_enabled(kind)
        ]
        self._keeps_casts = torch.is_autocast_cache_enabled()
        self._default = torch.get_default_device()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The calling thread, another one, with these settings."""
        with ExitStack() as scopes:
            if self._stream is not None:
                scopes.enter_context(torch.cuda.stream(self._stream))
            if self._default.type != "cpu":
                scopes.enter_context(self._default)
            scopes.enter_context(torch.set_grad_enabled(self._records))
            for kind, dtype in self._casts:
                scopes.enter_context(torch.autocast(kind, dtype, cache_enabled=self._keeps_casts))
            yield
