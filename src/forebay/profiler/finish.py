"""From what was recorded to the ``Trace``: sources first, then every tensor by the op that made it."""

from __future__ import annotations

from collections import defaultdict

from forebay.memory import Kind
from forebay.model import Model
from forebay.profiler.recorder import Recorder
from forebay.profiler.roots import Made, Root
from forebay.profiler.segments import Calls, Recorded, cut
from forebay.trace import Tensor, Trace

__all__ = ["finish"]


def finish(
    recorder: Recorder,
    model: Model,
    *,
    device: str,
    optimizer: str,
    state_names: tuple[str, ...],
    tokens: int,
    held_nbytes: int,
    unseen_nbytes: int,
    workspace_nbytes: int,
) -> Trace:
    """The trace of what ``recorder`` saw."""
    made = recorder.roots.made
    sources = [root.base for root in recorder.roots.roots if root.source is not None]
    is_source = set(sources)
    order = [*sources, *(number for number in range(len(made)) if number not in is_source)]
    ids = {number: place for place, number in enumerate(order)}
    lives = {root.number: _Life(recorder, root) for root in recorder.roots.roots}
    tensors = [_tensor(made[number], number, lives[made[number].root.number], ids) for number in order]
    given = {call: [ids[number] for number in numbers] for call, numbers in recorder.at.given.items()}
    # Of a block that somebody else calls part by part (a list of layers is one, if lists of layers are in a list) no
    # call would run again.
    modules = {block.name: block.module for block in model.blocks}
    at, asked = recorder.at, recorder.roots.asked
    whole = {call for call, (block, name) in at.began.items() if modules[block] in (None, name)}
    saved = {call: ops for call, ops in at.saved_last.items() if call in asked and call in whole}
    calls = Calls(saved, recorder.roots.kept, given, at.replaced)
    segments, visits = cut(_ops(recorder, ids, is_source, lives), tensors, calls)
    return Trace(
        model=model,
        device=device,
        optimizer=optimizer,
        state_names=state_names,
        tokens=tokens,
        sources=tuple(tensors[: len(sources)]),
        works=tuple(recorder.works.works),
        segments=segments,
        visits=visits,
        held_nbytes=held_nbytes,
        unseen_nbytes=unseen_nbytes,
        workspace_nbytes=workspace_nbytes,
        read_in_backward=tuple(b.name for b in model.blocks if b.name in recorder.parameters.in_backward),
        changed_buffers=recorder.changed_buffers,
        written=tuple(p.name for b in model.blocks for p in b.parameters if p.name in recorder.parameters.written),
        unrepeatable=tuple(b.name for b in model.blocks if b.name in recorder.changes_own | recorder.differentiates),
    )


class _Life:
    """When a root goes away, by number of op, and what it was."""

    def __init__(self, recorder: Recorder, root: Root) -> None:
        last = len(recorder.ops) - 1
        backward = recorder.backward_begins
        # What is still there when the step is over (its output, mostly) goes with the last op: ``held_nbytes`` says
        # how much of it the next forward will find.
        dropped = last if root.dropped is None else root.dropped
        unsaved = last if root.unsaved is None or root.handles > 0 else root.unsaved
        packed = root in recorder.roots.packed
        self.saved = packed and root.source is None and root.born < backward and unsaved >= backward
        # What forward itself asks for again, to take a gradient, has to be there all the time.
        self.saved &= root.number not in recorder.asked_early
        if packed and not self.saved:
            # Or saved for a graph that was let go before backward: it lived for as long as the later of the two.
            dropped = max(dropped, unsaved)
        self.dropped: int | None = None if root.source is not None or root.gradient else dropped
        self.unsaved: int | None = unsaved if self.saved else None
        self.spent = root.spent if self.saved and (root.spent or 0) >= backward else None
        self.released = root.released if self.saved and (root.released or 0) >= backward else None
        if self.saved and self.spent is None and self.released is None:
            self.released = unsaved  # kept beyond the step
        if root.source is not None:
            self.kind = root.source
        elif root.gradient:
            self.kind = Kind.GRADIENT
        elif root.born < backward and (self.saved or dropped >= backward):
            self.kind = Kind.ACTIVATION
        else:
            self.kind = Kind.TEMPORARY


def _tensor(made: Made, number: int, life: _Life, ids: dict[int, int]) -> Tensor:
    root = made.root
    own = root.base == number
    return Tensor(
        nbytes=root.nbytes if own else made.nbytes,
        dtype=made.dtype,
        kind=life.kind,
        root=ids[root.base],
        saved=life.saved and made.packed,
        name=root.name if own else "",
    )


def _ops(recorder: Recorder, ids: dict[int, int], is_source: set[int], lives: dict[int, _Life]) -> list[Recorded]:
    made: dict[int, list[int]] = defaultdict(list)
    for number, tensor in enumerate(recorder.roots.made):
        if number not in is_source:
            made[min(tensor.op, len(recorder.ops) - 1)].append(ids[number])
    dropped: dict[int, list[int]] = defaultdict(list)
    unsaved: dict[int, list[int]] = defaultdict(list)
    spent: dict[int, list[int]] = defaultdict(list)
    released: dict[int, list[int]] = defaultdict(list)
    packed: dict[int, list[int]] = defaultdict(list)
    for root in recorder.roots.roots:
        life = lives[root.number]
        if life.dropped is not None:
            dropped[life.dropped].append(ids[root.base])
        if life.unsaved is not None:
            unsaved[life.unsaved].append(ids[root.base])
        if life.spent is not None:
            spent[life.spent].append(ids[root.base])
        if life.released is not None:
            released[life.released].append(ids[root.base])
    for root, op in recorder.roots.packed.items():
        if lives[root.number].saved:
            packed[op].append(ids[root.base])
    return [
        Recorded(
            work=op.work,
            block=op.block,
            call=op.call,
            phase=op.phase,
            inputs=tuple(ids[n] for n in op.inputs),
            outputs=tuple(ids[n] for n in op.outputs),
            made=made.get(index, ()),
            dropped=dropped.get(index, ()),
            unsaved=unsaved.get(index, ()),
            spent=spent.get(index, ()),
            released=released.get(index, ()),
            packed=packed.get(index, ()),
            gradients=tuple((ids[p], ids[g]) for p, g in op.gradients),
        )
        for index, op in enumerate(recorder.ops)
    ]
