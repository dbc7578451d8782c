"""The seam between forebay and a machine: ``cpu``, ``cuda`` and ``fake``, behind one interface (``base``).

    base      the contract: buffers, lanes, completions, marks, the clock
    lanes     worker threads that serve the lanes
    event_log what they did, until somebody drains it
    delays    injected delays, for tests
    cpu       torch's ``cpu`` with a byte ledger as its device memory
    cuda      an NVIDIA GPU: streams, events, the caching allocator under a budget
    fake      a scripted clock; needs no torch, so that schedules can be tested in closed form

``open_device`` is how the rest of forebay gets a device. This module itself imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.device.base import Delays, Device
from forebay.errors import ModelError

if TYPE_CHECKING:
    import torch

__all__ = ["open_device"]


def open_device(
    spec: str | torch.device | Device | None = None,
    budget: int | None = None,
    *,
    delays: Delays | None = None,
) -> Device:
    """Opens the device that ``spec`` names: ``"cpu"``, ``"cuda"`` or ``"cuda:1"`` (None: ``cuda`` if there is one).

    ``budget`` is the bytes of device memory allowed (None: all there is). A ``Device`` is returned as it is, with
    the budget it was made with. Raises ``ModelError``, with the devices there are, for any other name.
    """
    if isinstance(spec, Device):
        return spec
    import torch

    if spec is None:
        spec = "cuda" if torch.cuda.is_available() else "cpu"
    name = str(spec)
    kind, _, index = name.partition(":")
    if kind == "cpu" and index in ("", "0"):
        from forebay.device.cpu import CpuDevice

        return CpuDevice(budget, delays=delays)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and (index == "" or index.isdecimal()):
        # torch's own meaning of "cuda" is the thread's current device. Asking for it would start CUDA, and the
        # allocator is configured before that; where CUDA has not started, the current device is 0.
        number = int(index) if index else (torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
        if number < count:
            from forebay.device.cuda import CudaDevice

            return CudaDevice(number, budget, delays=delays)
    available = ", ".join(["cpu", *(f"cuda:{i}" for i in range(count))])
    raise ModelError(f"there is no device {name!r} here for forebay; use one of {available}")
