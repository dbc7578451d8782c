"""Who computes an update: forebay's kernels on the host, torch's fused ones on any other device.

Both do the same operations in the same order. On x86-64 with AVX2 or AVX-512 the kernels give the bits of torch 2.13's
fused CPU ones; wherever they run, everything that one session updates in host memory (on the host, through a staging
buffer, on the device ``cpu``) is updated by the same code, so that the place changes no bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch

from forebay.optim.coding import Moment, draw_parameter, moments_of
from forebay.optim.halves import halve, join
from forebay.optim.parts import Arithmetic, Held, Part, Prepared, Room, brought, copied, master_of
from forebay.optim.rules import AdamRule, ElementRule, LionRule, SgdRule
from forebay.states import TIES, StateForm, form_of, is_wide, plain_name
from forebay.workspaces import PIECE

if TYPE_CHECKING:
    import numpy.typing as npt

    from forebay.kernels.native import Apart, Kept
    from forebay.kernels.team import Team
    from forebay.optim.launching import Alike

__all__ = ["KernelArithmetic", "KernelRule", "TorchArithmetic"]

_WIDE: Final = torch.float32


@final
class TorchArithmetic(Arithmetic):
    """Cast, torch's fused update, cast. Gradients of 16 bits become fp32 in ``workspace`` (1-D uint8, of as many bytes
    as ``workspaces.workspace_nbytes`` says), and so do parameters without a whole master; without one in new memory. So
    do, ``PIECE`` elements at a time, moments that are not fp32.

    torch updates in place: what goes into another copy is copied there first, which moves its bytes twice more."""

    def __init__(self, rule: ElementRule, workspace: torch.Tensor | None = None) -> None:
        self._rule = rule
        self._names = tuple(dict.fromkeys(plain_name(n) for n in rule.state_names if not n.endswith(":scale")))
        self._moments = None if is_wide(rule.state_names) else moments_of(rule.state_names)
        self._workspace = workspace

    def prepared(self, parts: Sequence[Part]) -> Prepared:
        return partial(self._update, tuple(parts))

    def _update(self, given: Sequence[Part], step: int, group: Mapping[str, Any]) -> None:
        parts = [brought(part) for part in given]
        if self._moments is not None:
            for part in parts:
                self._update_coded(part, self._moments, step, group)
            return
        room = Room(self._workspace)
        states = {name: [part.states[i] for part in parts] for i, name in enumerate(self._names)}
        joined = _Joined([part for part in parts if part.written.halves], self._names, room)
        targets, gradients = [], []
        for part in parts:
            if part.written.halves:
                target, gradient = joined.next_of(part)
            elif part.drawn:
                target, gradient = (room.like(tensor).copy_(tensor) for tensor in (part.parameter, part.gradient))
            else:
                target, gradient = part.parameter if part.master is None else part.master, part.gradient
                if gradient.dtype is not _WIDE:
                    gradient = room.like(gradient).copy_(gradient)
            targets.append(target)
            gradients.append(gradient)
        self._rule.update(targets, gradients, states, step, group)
        joined.take_apart()
        drawn = [(part, target) for part, target in zip(parts, targets, strict=True) if part.drawn]
        most = max((target.numel() for _, target in drawn), default=0)
        spare = room.take(2 * min(PIECE, most), parts[0].parameter.device) if drawn else None
        for part, target in drawn:
            if spare is not None:
                draw_parameter(part.parameter, target, step, part.place, spare)
        whole = [part for part in parts if part.master is not None and not part.written.halves]
        if whole:
            torch._foreach_copy_([part.parameter for part in whole], [master_of(part) for part in whole])

    def _update_coded(self, part: Part, moments: Sequence[Moment], step: int, group: Mapping[str, Any]) -> None:
        numel = part.parameter.numel()
        for start in range(0, numel, PIECE):
            self._update_piece(part, slice(start, min(start + PIECE, numel)), moments, step, group)
        if part.master is not None:
            part.parameter.copy_(part.master)

    def _update_piece(
        self, part: Part, span: slice, moments: Sequence[Moment], step: int, group: Mapping[str, Any]
    ) -> None:
        """Of one piece, of which nothing is there any more when the next one begins."""
        target, drawn = part.parameter if part.master is None else part.master, part.drawn
        firsts = [sum(m.width for m in moments[:i]) for i in range(len(moments))]
        held = [part.states[first : first + m.width] for first, m in zip(firsts, moments, strict=True)]
        take = partial(Room(self._workspace).take, device=target.device)
        spare = take(2 * (span.stop - span.start))
        pairs, ends = zip(moments, held, strict=True), (span.start, span.stop)
        wide = [moment.read(states, *ends, take, spare) for moment, states in pairs]
        by_name = {name: [value] for name, value in zip(self._names, wide, strict=True)}
        piece, gradient = target[span], part.gradient[span]
        if drawn:
            piece = take(piece.numel()).copy_(piece)
        if gradient.dtype is not _WIDE:
            gradient = take(gradient.numel()).copy_(gradient)
        self._rule.update([piece], [gradient], by_name, step, group)
        if drawn:
            draw_parameter(target[span], piece, step, part.place + span.start, spare)
        for moment, states, value in zip(moments, held, wide, strict=True):
            moment.write(states, span.start, value, step, part.place, spare)


@final
class _Joined:
    """The masters of ``parts``, of which half is kept, put together in ``room`` for an update in place; ``names`` are
    their states."""

    def __init__(self, parts: Sequence[Part], names: Sequence[str], room: Room) -> None:
        self._halves = [part.parameter for part in parts], [master_of(part) for part in parts]
        self._ties = [part.states[names.index(TIES)] for part in parts]
        self._masters, self._spare = ([room.like(part.gradient) for part in parts] for _ in range(2))
        if parts:
            join(self._masters, *self._halves, self._ties, self._spare)
        self._pairs = zip(self._masters, self._spare, strict=True)

    def next_of(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """The master of ``part``, the next one, and its gradient in fp32, which is where nothing else is meanwhile."""
        master, spare = next(self._pairs)
        return master, spare.copy_(part.gradient)

    def take_apart(self) -> None:
        """Both halves are what the masters are now."""
        if self._masters:
            halve(self._masters, *self._halves, self._ties, self._spare)


KernelRule = AdamRule | LionRule | SgdRule
"""What there are kernels for."""


@final
class KernelArithmetic(Arithmetic):
    """One pass over memory, on the threads of ``team``; tensors must be in host memory."""

    def __init__(self, rule: KernelRule, team: Team) -> None:
        # numba takes a third of a second to import: not before there is something to update.
        from forebay.optim.launching import FORMS, Alike, chooser_of, left_alone

        self._team = team
        self._choose, self._columns = chooser_of(rule)
        self._left_alone = partial(left_alone, rule)
        self._states = tuple(form_of(state) for state in rule.state_names)
        self._forms = FORMS
        self._alike = Alike

    def prepared(self, parts: Sequence[Part]) -> Prepared:
        alike: dict[Alike, list[list[int]]] = defaultdict(list)
        for part in parts:
            apart, forms = _apart(part), (self._forms[part.parameter.dtype], self._forms[part.gradient.dtype])
            kind = self._alike(*forms, apart, _kept(part))
            alike[kind].append(self._row(part, apart=bool(apart)))
        tables = {kind: np.array(rows, dtype=np.int64) for kind, rows in alike.items()}
        # Of all else the addresses are enough: whoever keeps this keeps no more tensors than these.
        apart_states = {
            number: [(part.written.states[number], part.states[number]) for part in parts if part.into is not None]
            for number in self._left_alone(None)
        }
        return partial(self._update, tables, apart_states)

    def _update(
        self,
        tables: Mapping[Alike, npt.NDArray[np.int64]],
        apart_states: Mapping[int, Sequence[tuple[torch.Tensor, torch.Tensor]]],
        step: int,
        group: Mapping[str, Any],
    ) -> None:
        for alike, rows in tables.items():
            launch = self._choose(alike, step, group)
            self._team.take_turns(partial(launch, rows), int(rows[:, 0].sum()))
        for number in self._left_alone(group):
            for target, source in apart_states[number]:
                copied(self._team, target, source)

    def _row(self, part: Part, *, apart: bool) -> list[int]:
        """A row of a kernel's table; two in one where something is ``apart`` (``kernels.native.Apart``)."""
        copies = [part.written]
        if apart:
            copies.insert(0, replace(part, into=None).written)
        row: list[int] = []
        for held in copies:
            addresses = _addresses(part.gradient, held, self._states)
            room = len(self._columns) - len(addresses)
            row += [*addresses, *([0] * room)]
            if self._columns[-1] == "place":
                row[-1] = part.place
        return row


def _apart(part: Part) -> Apart:
    """What of ``part`` is written elsewhere than it is read."""
    from forebay.kernels.native import Apart

    into, found = part.into, Apart.NOTHING
    if into is None:
        return found
    wide, target = (part.parameter, into.parameter) if into.master is None else (master_of(part), into.master)
    # Two halves go together.
    upper = into.halves and part.parameter.data_ptr() != into.parameter.data_ptr()
    if upper or wide.data_ptr() != target.data_ptr():
        found |= Apart.WIDE
    moved = {a.data_ptr() != b.data_ptr() for a, b in zip(part.states, into.states, strict=True) if a.numel()}
    # The compiler is told that what is written is nothing that is read, of all states or of none.
    if len(moved) > 1:
        raise ValueError("an update was given some states in place and some apart")
    return found | Apart.MOMENTS if True in moved else found


def _kept(part: Part) -> Kept:
    """How what becomes of the parameter of ``part`` is kept."""
    from forebay.kernels.native import Kept

    if part.drawn:
        return Kept.DRAWN
    return Kept.LOWER if part.written.halves else Kept.WIDE


def _addresses(gradient: torch.Tensor, held: Held, forms: Sequence[StateForm]) -> list[int]:
    """How many elements, then where each stream of one copy begins; 0 for a stream that is not there."""
    count = held.parameter.numel()
    tensors = (gradient, held.parameter, held.master, *held.states)
    counts = [count] * 3 + [form.count(count) for form in forms]
    # A kernel looks at nothing but addresses: whatever does not lie as it thinks would be someone else's memory.
    for tensor, expected in zip(tensors, counts, strict=True):
        if tensor is not None and not (tensor.numel() == expected and tensor.is_contiguous() and tensor.is_cpu):
            raise ValueError(f"an update of {count} elements in host memory was given {tensor.numel()} elsewhere")
    return [count, *(0 if tensor is None else tensor.data_ptr() for tensor in tensors)]
