"""Who reads and who changes the parameters of a recorded step, and whether anybody asks for their block then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from forebay.memory import Kind
from forebay.model import Block
from forebay.profiler.roots import Roots

__all__ = ["ParameterUses"]


@final
class ParameterUses:
    """Those of one step. ``outside`` are the blocks whose parameters were read while none of the modules ran that ask
    for them, ``in_backward`` those of which backward reads a parameter itself, not what autograd has saved of it, at
    such a time, ``written`` those whose parameters the forward changes."""

    def __init__(self, roots: Roots) -> None:
        self.outside: set[str] = set()
        self.in_backward: set[str] = set()
        self.written: set[str] = set()
        self._roots = roots
        self._asking: Counter[str] = Counter()  # modules that ask for a block and run
        # By the number of a parameter's root, and by the parameter's id: the recorder's owner holds them.
        self._askers: dict[int, Block] = {}
        self._names: dict[int, str] = {}
        self._blocks: dict[int, Block] = {}
        self._numbers: dict[int, int] = {}
        self._began: list[tuple[str, torch.Tensor, int]] = []

    def add(self, tensor: torch.Tensor, name: str, block: Block) -> None:
        """``tensor`` is the parameter ``name`` of ``block``."""
        root = self._roots.add(tensor, source=Kind.PARAMETER, name=name)
        self._blocks[id(tensor)], self._numbers[id(tensor)] = block, root.base
        self._names[root.number] = name
        self._began.append((name, tensor, _storage(tensor)))
        if not block.held:
            self._askers[root.number] = block

    def number_of(self, parameter: torch.Tensor) -> int:
        """Its number, also when its ``data`` has been set to another tensor."""
        return self._numbers[id(parameter)]

    def follow(self, modules: Mapping[str, nn.Module]) -> Iterator[RemovableHandle]:
        """Hooks ``modules``, by name all that ask for a block, so that it is known whether one of them runs."""
        for name, module in modules.items():

            def before(module: nn.Module, args: Any, name: str = name) -> None:
                self._asking[name] += 1

            def after(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                self._asking[name] -= 1

            yield module.register_forward_pre_hook(before, prepend=True)
            yield module.register_forward_hook(after, always_call=True)

    def read(self, numbers: Iterable[int], running: Sequence[str]) -> None:
        """An op of the forward reads the tensors ``numbers`` while the modules ``running`` do."""
        for number in numbers:
            block = self._askers.get(self._roots.made[number].root.number)
            if block is not None and not any(name in block.modules for name in running):
                self.outside.add(block.name)

    def read_again(self, tensors: Iterable[torch.Tensor]) -> None:
        """An op of backward reads ``tensors``: a function that runs again does so where nobody asks for the block. What
        autograd has saved is another tensor, which ``unpack`` has made."""
        for tensor in tensors:
            block = self._blocks.get(id(tensor))
            if block is not None and not any(self._asking[name] for name in block.modules):
                self.in_backward.add(block.name)

    def write(self, written: Iterable[torch.Tensor]) -> None:
        """An op of the forward is about to write to tensors."""
        for tensor in written:
            name = self._names.get(self._roots.made[self._roots.number(tensor)].root.number)
            if name is not None:
                self.written.add(name)

    def forward_ends(self) -> None:
        """Whose ``data`` is another tensor now?"""
        self.written |= {name for name, tensor, key in self._began if _storage(tensor) != key}


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
