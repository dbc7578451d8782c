"""The random number generators that training draws from: Python's, NumPy's, torch's and the session's own."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from forebay.checkpoint.encoding import decode, encode
from forebay.errors import StorageError
from forebay.runtime.session import Session

__all__ = ["capture", "restore"]

_TWISTER: Final = 624
"""Words of the state of a Mersenne twister."""


def capture(session: Session) -> dict[str, Any]:
    """The states of all generators now, for JSON. Nothing is drawn."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    drawn = session.stash.coder.state
    return {
        "python": {"version": version, "words": struct.pack(f"<{len(words)}Q", *words).hex(), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "words": np.asarray(keys, dtype="<u4").tobytes().hex(),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        },
        "torch": encode(torch.get_rng_state(), "torch"),
        "device": _on_device(session.torch_device),
        "codes": None if drawn is None else encode(drawn, "codes"),
    }


def restore(session: Session, saved: Mapping[str, Any]) -> None:
    """Puts all generators into the states of ``capture``. That of an accelerator stays as it is where none was saved.

    Raises ``StorageError`` for states that these generators do not take.
    """
    try:
        python, numpy = saved["python"], saved["numpy"]
        packed = bytes.fromhex(python["words"])
        words = struct.unpack(f"<{len(packed) // 8}Q", packed)
        keys = np.frombuffer(bytes.fromhex(numpy["words"]), dtype="<u4")
        # NumPy reads the word at the position, wherever that is.
        if len(keys) != _TWISTER or not 0 <= numpy["position"] <= _TWISTER:
            raise ValueError(f"NumPy's has {len(keys)} words and is at {numpy['position']}")
        random.setstate((python["version"], words, python["gauss"]))
        np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
        torch.set_rng_state(decode(saved["torch"]))
        if saved["device"] is not None and session.torch_device.type == "cuda":
            torch.cuda.set_rng_state(decode(saved["device"]), session.torch_device)
        session.stash.coder.state = None if saved["codes"] is None else decode(saved["codes"])
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, struct.error) as error:
        raise StorageError(f"the checkpoint's states of random number generators cannot be used: {error}") from None


def _on_device(device: torch.device) -> Any:
    return encode(torch.cuda.get_rng_state(device), "device") if device.type == "cuda" else None
