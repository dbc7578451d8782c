"""Where the graph of one micro-batch is cut, so that backward can run segment by segment.

A *segment* is what one forward does from one turn to the next (accumulate.py). Whatever it reads that an earlier
segment has made comes to it through a *gate*: a tensor over the same bytes, in whose place backward leaves the gradient
that has come so far. Later the gradient goes into the earlier segment, together with its other results.

autograd runs the nodes of a graph in the reverse of the order in which they were made, each as soon as all its
gradients are there, and adds gradients in the order in which they arrive. Segments are stretches of that order. So
the numbers are those of an uncut graph as long as what comes from later segments goes in first: a gate that another
segment reads too is a root of that segment's backward, with the gradient so far.

Tensors come from one segment to the next as arguments of a block, which ``Cutter.entering`` replaces, or in between,
where a function mode replaces them. Inside of a block the mode is off: it would cost time in every op.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from forebay.errors import ModelError

__all__ = ["Cutter", "Segment"]


@final
class _Cut:
    """One tensor that later segments read. ``origin`` is where its gradient belongs, ``gradient`` what has come.
    ``is_open``: the forward that has made it is not over."""

    __slots__ = ("gradient", "is_open", "origin")

    def __init__(self, origin: GradientEdge) -> None:
        self.origin: GradientEdge | None = origin
        self.gradient: torch.Tensor | None = None
        self.is_open = True


class _Gate(torch.autograd.Function):
    """Returns the bytes of a tensor as a tensor of its own; its backward ends here."""

    @staticmethod
    def forward(ctx: Any, key: torch.Tensor, tensor: torch.Tensor, cut: _Cut) -> torch.Tensor:
        ctx.cut = cut
        ctx.set_materialize_grads(False)
        # Not the input itself, which would make the result a view that nothing may change in place.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None, None]:
        if ctx.cut.is_open:
            raise _inside()
        ctx.cut.gradient = gradient
        return None, None, None


_through_gate: Any = _Gate.apply
_PYTHON_NODE: Any = torch.autograd.function.BackwardCFunction


def _cut_of(node: Any) -> _Cut | None:
    """The cut behind a node, if it is a gate."""
    if not isinstance(node, _PYTHON_NODE) or node._forward_cls is not _Gate:
        return None
    cut: _Cut = node.cut
    return cut


with torch.inference_mode(False):  # this may be imported by a call that is refused under it
    _LEAF = type(get_gradient_edge(torch.zeros((), requires_grad=True)).node)
"""The nodes at which gradients of parameters end."""

_CAST = "ToCopyBackward0"
"""The node of a cast, autocast's among them."""


def _autocast_is_on() -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


@final
@dataclass(slots=True, eq=False)
class Segment:
    """What backward of one segment begins with and ends at.

    ``cuts`` are tensors made in it that later segments read, ``gates`` those that it reads, ``leaves`` the parameters
    (and other leaves) that it contributes to, ``cast`` those of them that autocast has cast.
    """

    cuts: list[_Cut] = field(default_factory=list)
    gates: list[Node] = field(default_factory=list)
    leaves: list[torch.Tensor] = field(default_factory=list)
    cast: list[torch.Tensor] = field(default_factory=list)
    loss: torch.Tensor | None = None

    def backward(self, first: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Runs the nodes of the segment; all later ones have run. ``first`` are leaves with what goes in before."""
        roots: list[Any] = [tensor for tensor, _ in first]
        gradients: list[torch.Tensor | None] = [gradient for _, gradient in first]
        if self.loss is not None:
            roots.append(self.loss)
            gradients.append(None)
        for cut in self.cuts:
            if cut.gradient is not None:
                roots.append(cut.origin)
                gradients.append(cut.gradient)
                cut.gradient = None
        contributes = len(roots) > len(first)
        for gate in self.gates:
            later = _cut_of(gate)
            if later is not None and later.gradient is not None:
                roots.append(GradientEdge(gate, 0))
                gradients.append(later.gradient)
        if contributes or first:
            torch.autograd.backward(roots, gradients)
        self.close()

    def end_at(self, end: Any, node: Node, *, casts: bool) -> None:
        """``node`` contributes to the leaf behind ``end``; with ``casts``, a node that casts it may be autocast's."""
        self.leaves.append(end.variable)
        if casts and node.name() == _CAST:
            self.cast.append(end.variable)

    def close(self) -> None:
        """Lets go of the graph."""
        for cut in self.cuts:
            cut.origin = cut.gradient = None
        self.cuts.clear()
        self.gates.clear()
        self.leaves.clear()
        self.cast.clear()
        self.loss = None


@final
class Cutter:
    """Cuts one forward. All of it runs in one thread, whose numbering of nodes says what was made when."""

    def __init__(self) -> None:
        self._key = torch.zeros((), requires_grad=True, device="cpu")
        # The number of the first node of each segment but the first.
        self._marks: list[int] = []
        self._cuts: list[_Cut] = []
        # What replaces a tensor, for as long as somebody holds the tensor.
        self._gates = WeakTensorKeyDictionary()
        self._mode = _Between(self)
        # Whether autocast was on, and kept its casts, when a block began.
        self._casts = False

    @property
    def segments(self) -> int:
        """The segments so far."""
        return len(self._marks) + 1

    @contextmanager
    def between_blocks(self) -> Iterator[None]:
        """The forward runs inside of this."""
        _push_mode(self._mode)
        try:
            yield
        finally:
            self.enter()

    def enter(self) -> None:
        """A block's forward begins: its arguments have been seen to."""
        self._casts |= torch.is_autocast_cache_enabled() and _autocast_is_on()
        above = []
        if any(mode is self._mode for mode in _get_current_function_mode_stack()):
            while (top := _pop_mode()) is not self._mode:
                above.append(top)
        for other in reversed(above):
            _push_mode(other)

    def leave(self) -> None:
        """The block's forward is over."""
        _push_mode(self._mode)

    def mark(self) -> None:
        """From here on it is another segment."""
        self._marks.append(_get_sequence_nr())

    def replaced(self, values: Any) -> Any:
        """``values`` with a gate in the place of every tensor that an earlier segment has made."""
        return tree_map(self._replaced, values) if self._marks and torch.is_grad_enabled() else values

    def _replaced(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # What was replaced once goes on as what it was replaced by: that may have been changed in place.
        tensor = self._gates.get(value, value)
        node = tensor.grad_fn
        if node is None or node._sequence_nr() >= self._marks[-1] or _cut_of(node) is not None:
            return tensor
        cut = _Cut(get_gradient_edge(tensor))
        self._cuts.append(cut)
        gate = _through_gate(self._key, tensor.detach(), cut)
        self._gates[value] = self._gates[tensor] = gate
        return gate

    def finished(self, loss: torch.Tensor) -> list[Segment]:
        """The forward is over and has made ``loss``; the segments in their order.

        Raises ``ModelError`` where a segment reads what an earlier one has made and no gate lies between.
        """
        self._gates.clear()
        segments = [Segment() for _ in range(self.segments)]
        seen: dict[Node, int] = {}
        waiting: list[Node] = []
        gates: list[dict[Node, None]] = [{} for _ in segments]

        def found(node: Node) -> int:
            if node not in seen:
                seen[node] = bisect_right(self._marks, node._sequence_nr())
                waiting.append(node)
            return seen[node]

        root = get_gradient_edge(loss).node
        own = isinstance(root, _LEAF) or _cut_of(root) is not None
        segments[-1 if own else found(root)].loss = loss
        for cut in self._cuts:
            cut.is_open = False
            if cut.origin is not None:
                segments[found(cut.origin.node)].cuts.append(cut)
        while waiting:
            node = waiting.pop()
            place = seen[node]
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if isinstance(following, _LEAF):
                    segments[place].end_at(following, node, casts=self._casts)
                elif _cut_of(following) is not None:
                    gates[place][following] = None
                elif found(following) < place:
                    raise _uncut(following)
        for segment, read in zip(segments, gates, strict=True):
            segment.gates.extend(read)
        self._cuts.clear()
        return segments

    def close(self) -> None:
        """Lets go of what is cut."""
        for cut in self._cuts:
            cut.origin = cut.gradient = None
        self._cuts.clear()
        self._gates.clear()


def _uncut(node: Node) -> ModelError:
    return ModelError(
        f"a block, or a function of its own kind between blocks, reads what was made before it ({node.name()}) and was "
        f"not given it as an argument, so that backward cannot run block by block; train this model with the loop "
        f"itself: loss.backward() for each micro-batch"
    )


def _inside() -> ModelError:
    return ModelError(
        "the loss of a micro-batch takes gradients itself (backward, torch.autograd.grad) through blocks that all "
        "micro-batches pass together, where the graph is cut; train this model with the loop itself: loss.backward() "
        "for each micro-batch"
    )


_TAKES_GRADIENTS = frozenset({torch.autograd.grad, torch.Tensor.backward})
"""Functions that tell a mode of themselves, with what they are asked for: ``inputs``, or all leaves."""


def _expect_within(outputs: Any, inputs: Any) -> None:
    """Raises ``ModelError`` where the gradients of ``outputs`` with respect to ``inputs`` have a part behind a gate,
    which autograd would leave out. (All leaves: where it comes to one the gate says so.)"""
    wanted = {get_gradient_edge(tensor).node for tensor in tree_leaves(inputs) if isinstance(tensor, torch.Tensor)}
    # Behind a gate, or not; what is met both ways is looked at for each.
    waiting = [(tensor.grad_fn, False) for tensor in tree_leaves(outputs) if isinstance(tensor, torch.Tensor)]
    seen = set(waiting)
    while waiting:
        node, behind = waiting.pop()
        if node is None:
            continue
        if behind and node in wanted:
            raise _inside()
        cut = _cut_of(node)
        following = [(n, behind) for n, _ in node.next_functions]
        if cut is not None and cut.origin is not None:
            following = [(cut.origin.node, True)]
        waiting += [one for one in following if one not in seen]
        seen.update(following)


@final
class _Between(TorchFunctionMode):
    """Replaces the tensors that go into torch's functions outside of blocks."""

    def __init__(self, cutter: Cutter) -> None:
        super().__init__()
        self._cutter = cutter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._cutter.replaced((args, kwargs or {}))
        if func in _TAKES_GRADIENTS and (inputs := kwargs.get("inputs", args[1:2])):
            _expect_within(args[0], inputs)
        return func(*args, **kwargs)
