"""A U-Net: forward keeps what each stage makes until the way back joins it."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["unet"]

WIDTHS = (64, 128, 256, 512, 1024)
CLASSES = 2


def _stage(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pairs = list(zip((3, *WIDTHS), WIDTHS, strict=False))
        self.down = nn.ModuleList([_stage(before, after) for before, after in pairs])
        back = list(zip(WIDTHS[:0:-1], WIDTHS[-2::-1], strict=True))
        self.widen = nn.ModuleList([nn.ConvTranspose2d(before, after, 2, stride=2) for before, after in back])
        self.up = nn.ModuleList([_stage(2 * after, after) for _, after in back])
        self.head = nn.Conv2d(WIDTHS[0], CLASSES, 1)

    def forward(self, image: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        kept: list[torch.Tensor] = []
        x = image
        for stage in self.down:
            x = stage(nn.functional.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        kept.pop()
        for widen, stage in zip(self.widen, self.up, strict=True):
            x = stage(torch.cat([kept.pop(), widen(x)], 1))
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, mask), "logits": logits}


def unet() -> nn.Module:
    """For images of three channels, a class for each pixel (Ronneberger et al., 2015; here padded, with norms)."""
    return _UNet()
