"""Batches for tiny architectures, by task: small, made up, and the same for the same number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

__all__ = ["AUDIO", "BATCHES", "CLIPS", "DETECTION", "IMAGES", "SEGMENTATION", "SPEECH", "words"]

IMAGES: Final = "image classification"
AUDIO: Final = "audio classification"
SPEECH: Final = "speech recognition"
DETECTION: Final = "object detection"
SEGMENTATION: Final = "semantic segmentation"
CLIPS: Final = "video classification"

ROWS: Final = 2
WORDS: Final = 96
"""Of the vocabulary that batches have."""

SAMPLES, FRAMES = 6400, 40
"""Of sound as it is, and as features."""

SIDE: Final = 64
"""Of an image, where a configuration does not say."""

Make = Callable[[Any, torch.Generator], dict[str, Any]]
"""Of a model of transformers."""


def words(model: Any, draw: torch.Generator) -> dict[str, Any]:
    """Token ids, (2, 16)."""
    most = min(model.config.get_text_config().vocab_size, WORDS)
    ids = torch.randint(3, most, (ROWS, 16), generator=draw)
    return {"input_ids": ids, "labels": ids}


def _pixels(numbers: Mapping[str, Any], draw: torch.Generator, *frames: int) -> torch.Tensor:
    sizes = numbers.get("image_size") or SIDE
    height, width = (sizes, sizes) if isinstance(sizes, int) else sizes
    return torch.randn(ROWS, *frames, numbers.get("num_channels", 3), height, width, generator=draw)


def _classes() -> torch.Tensor:
    return torch.arange(ROWS)


def _images(model: Any, draw: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": _pixels(model.config.to_dict(), draw), "labels": _classes()}


def _clips(model: Any, draw: torch.Generator) -> dict[str, Any]:
    numbers = model.config.to_dict()
    frames = numbers.get("num_frames") or numbers.get("frames_per_clip", 8)
    return {model.main_input_name: _pixels(numbers, draw, frames), "labels": _classes()}


def _sound(model: Any, draw: torch.Generator) -> dict[str, Any]:
    numbers = model.config.to_dict()
    mels = numbers.get("num_mel_bins")
    shape: tuple[int, ...] = (SAMPLES,)
    if mels is not None and "max_source_positions" in numbers:
        shape = (mels, 2 * numbers["max_source_positions"])
    elif mels is not None and "max_length" in numbers:
        shape = (numbers["max_length"], mels)
    elif "feature_projection_input_dim" in numbers:
        shape = (FRAMES, numbers["feature_projection_input_dim"])
    return {model.main_input_name: torch.randn(ROWS, *shape, generator=draw)}


def _audio(model: Any, draw: torch.Generator) -> dict[str, Any]:
    return {**_sound(model, draw), "labels": _classes()}


def _speech(model: Any, draw: torch.Generator) -> dict[str, Any]:
    return {**_sound(model, draw), "labels": torch.randint(1, 20, (ROWS, 3), generator=draw)}


def _detection(model: Any, draw: torch.Generator) -> dict[str, Any]:
    labels = []
    for objects in range(2, 2 + ROWS):
        classes = torch.randint(0, 2, (objects,), generator=draw)
        labels.append({"class_labels": classes, "boxes": 0.3 + 0.3 * torch.rand(objects, 4, generator=draw)})
    return {"pixel_values": _pixels(model.config.to_dict(), draw), "labels": labels}


def _segmentation(model: Any, draw: torch.Generator) -> dict[str, Any]:
    pixels = _pixels(model.config.to_dict(), draw)
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (ROWS, *pixels.shape[-2:]), generator=draw)}


BATCHES: Final[Mapping[str, Make]] = MappingProxyType(
    {
        IMAGES: _images,
        CLIPS: _clips,
        AUDIO: _audio,
        SPEECH: _speech,
        DETECTION: _detection,
        SEGMENTATION: _segmentation,
    }
)
"""What is no text."""
