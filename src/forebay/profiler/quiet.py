"""What torch says of its own accord while a step is recorded."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

__all__ = ["quiet_torch"]


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Keeps torch from telling of a fake op that failed: the error says what is to be said, and to ask for a value that
    is not there, as anomaly mode does of every gradient, is none of the model's."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    anomalies = torch.is_anomaly_enabled()
    before, log.disabled = log.disabled, True
    # Else as it is: what is caught so is warned of anew each time, and a model warns in its forward.
    with warnings.catch_warnings() if anomalies else nullcontext():
        if anomalies:
            warnings.filterwarnings("ignore", "Error detected in ")
        try:
            yield
        finally:
            log.disabled = before
