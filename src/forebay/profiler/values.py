"""Integers are real, floats are fake: the values that a model's control flow may ask for while nothing is computed.

Token ids, masks, positions and what follows from them are ordinary tensors here, and ops on nothing but them run for
real; so do ops on small floats that follow from integers alone. Parameters, float inputs and everything that they
touch are fake. Which experts a router picks depends on floats that nobody has; it is taken as balanced.

That integers are no fakes also lets libraries take the path that they take in training: transformers builds other
attention masks for a ``FakeTensor`` than for a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast, final

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from forebay.device.schema import bound, written_by
from forebay.profiler.alike import Alike, stand_in
from forebay.profiler.guesses import PASSED, Guess, Place, asking_place, draw_single
from forebay.profiler.roots import Roots
from forebay.profiler.routing import route
from forebay.profiler.work import is_view, tensors_in

__all__ = ["LIFTS", "Unknown", "Values", "is_fake"]

aten = torch.ops.aten

LARGEST_FLOAT = 1 << 20
"""Elements: floats that follow from integers are real up to this size. Larger ones are masks, which decide nothing."""
LARGEST_INTEGER = 1 << 28
"""Bytes: integers are real up to this size."""

MOST_DECIDED = 1000
"""Times that a step may ask for a value that nobody has."""

LIFTS = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default})
"""Ops through which ``torch.tensor(3)`` enters a step."""

_FILLS: Mapping[str, int] = MappingProxyType(
    {"zeros_like": 0, "new_zeros": 0, "empty_like": 0, "new_empty": 0, "ones_like": 1, "new_ones": 1}
)
# Ops that pick among floats: the dimension's argument place (None: the last dimension), and its default.
_PICKS: Mapping[str, tuple[int | None, int]] = MappingProxyType(
    {
        "topk": (2, -1),
        "sort": (1, -1),
        "argmax": (1, 0),
        "argmin": (1, 0),
        "max": (1, 0),
        "min": (1, 0),
        "kthvalue": (2, -1),
        "median": (1, 0),
        "mode": (1, -1),
        "multinomial": (None, -1),
    }
)


@final
class Unknown(Exception):
    """An op asks for values that are not known."""


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has no values."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


@final
class Values:
    """Runs ops under a ``FakeTensorMode``, for real where all values are known and may be asked for.

    ``picked`` says whether picks had to be made up, ``asked`` whether a size or a Python value was then asked for that
    follows from them, and ``routed`` whether all of them are picks of a router's kind, which follow ``guess``: distinct
    ones among more, along the last dimension. Others are always balanced. ``drawn`` says whether a single number was
    drawn at random, by ``guess`` (also of Python and NumPy, ``host_draws``), ``checked`` whether all elements of a
    tensor were asked about (``PASSED``), ``masked`` whether elements were chosen by a mask that nobody knows,
    ``decided`` how often a value was asked for that nobody has, and ``decided_at`` where, the last place last.
    """

    def __init__(self, roots: Roots, guess: Guess) -> None:
        self._roots = roots
        self._guess = guess
        self.alike = Alike()
        self._made_up = False
        self.picked = self.asked = self.drawn = self.checked = self.masked = False
        self.decided = 0
        self.decided_at: dict[Place, None] = {}
        self.routed = True

    def run(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
        """The result of an op, its tensors real or fake. Raises ``Unknown`` where it cannot be told."""
        self._made_up = any(self._is_picked(tensor) for tensor in inputs)
        self.asked |= self._made_up and _asks_values(func, args)
        if all(self._is_known(tensor) for tensor in inputs):
            return self._run_known(func, args, kwargs, bool(inputs))
        if _asks_values(func, args):
            return self._answer(func, args)
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        name = func.overloadpacket.__name__
        if func in PASSED:
            self.checked = True
            with _disable_current_modes():
                return torch.full((), PASSED[func], device=inputs[0].device)
        unknown = _is_unknown_to_torch(func, args)
        result = _grouped_mm(args, kwargs) if unknown else self.alike.run(func, args, kwargs)
        if name in _FILLS and not result.is_floating_point() and _is_wanted(result):
            with _disable_current_modes():
                like = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
                return like.fill_(_FILLS[name])
        return self._with_picks(name, args, result) if name in _PICKS else result

    def follow(self, outputs: list[torch.Tensor]) -> None:
        """After ``run``, when the roots of its ``outputs`` are known: notes which of them follow from picks."""
        if self._made_up:
            for tensor in outputs:
                found = None if is_fake(tensor) else self._roots.find(tensor)
                if found is not None:
                    found[0].picked = True

    def _is_picked(self, tensor: torch.Tensor) -> bool:
        found = None if is_fake(tensor) else self._roots.find(tensor)
        return found is not None and found[0].picked

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if is_fake(tensor):
            return False
        found = self._roots.find(tensor)
        return found is None or found[0].trusted

    def _run_known(self, func: Any, args: Any, kwargs: Any, has_inputs: bool) -> Any:
        at_once = _asks_values(func, args) or func._schema.is_mutable or func in LIFTS
        if not at_once and not (has_inputs and is_view(func)):
            # Of fake tensors first: what comes out may be too large to be worth its values. Of real ones alone torch
            # computes differences and products whatever their size, and then forgets the values.
            result = self.alike.run(func, _faked(args), _faked(kwargs))
            outputs = tensors_in(result)
            if not outputs or not all(map(_is_wanted, outputs)):
                return result
        with _disable_current_modes():
            real = func(*args, **kwargs)
            if "empty" in func.overloadpacket.__name__ and isinstance(real, torch.Tensor):
                real.zero_()  # the same in every run
            elif torch.Tag.nondeterministic_seeded in func.tags and isinstance(real, torch.Tensor):
                given = {argument.name: value for argument, value in bound(func, args, kwargs)}
                self.drawn |= draw_single(self._guess.draw, func, given, real)
            return real

    def _answer(self, func: Any, args: Any) -> Any:
        """The result of an op whose size depends on a mask or on lengths, or that asks for a value. Lengths are known.
        Of a mask that is not all elements are taken, tensors are not equal, values are those of the guess."""
        if func is aten._local_scalar_dense.default:
            return self._decided(args[0])
        if func is aten.masked_select.default:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            return args[0].new_empty((len(self._chosen(args[1], shape)[0]),))
        if func is aten.nonzero.default:
            places = self._chosen(args[0])
            with _disable_current_modes():
                return torch.stack(places, 1)[:, : args[0].dim()]  # of one element without dimensions, too
        if func is aten._ctc_loss.Tensor:
            return self._ctc_loss(args[0], args[3])
        if func is aten.equal.default:
            self.checked = True
            return False
        if func is not aten.index.Tensor:
            raise Unknown
        indices: list[torch.Tensor | None] = []
        for index in args[1]:
            if index is None or not _is_mask(index):
                indices.append(index)
            else:
                indices.extend(self._chosen(index))
        result: torch.Tensor = func(args[0], indices)
        return result

    def _decided(self, asked: torch.Tensor) -> bool | float:
        self.decided += 1
        # A loop that goes on until a value says so has no end here.
        if self.decided > MOST_DECIDED or not (asked.dtype is torch.bool or asked.is_floating_point()):
            raise Unknown
        place = asking_place()
        self.decided_at.pop(place, None)
        self.decided_at[place] = None
        return self._guess.decides(place, asked.dtype is torch.bool)

    def _chosen(self, mask: torch.Tensor, shape: torch.Size | None = None) -> tuple[torch.Tensor, ...]:
        """The places that ``mask`` (as of ``shape``) says, by dimension."""
        known = self._is_known(mask)
        self.masked |= not known
        with _disable_current_modes():
            there = mask if known else torch.ones(mask.shape, dtype=torch.bool, device=mask.device)
            return there.expand(shape or mask.shape).nonzero(as_tuple=True)

    def _ctc_loss(self, log_probs: torch.Tensor, target_lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses of a batch, and the log-probabilities of the prefixes of each target, with a blank around every
        label, up to each time (Graves et al., "Connectionist temporal classification", ICML 2006, section 4.1):
        ``log_probs`` are (times, batch, labels)."""
        if not self._is_known(target_lengths):
            raise Unknown
        with _disable_current_modes():
            most = int(target_lengths.max()) if target_lengths.numel() else 0
        times, batch = log_probs.shape[:2]
        return log_probs.new_empty((batch,)), log_probs.new_empty((batch, times, 2 * most + 1))

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op in place that is given unknown values: real tensors that it writes to are worth nothing any more."""
        targets = tensors_in(written_by(func, args, kwargs))
        result = self.alike.run(func, args, kwargs)
        for target in targets:
            found = None if is_fake(target) else self._roots.find(target)
            if found is not None:
                found[0].trusted = False
        returned = func._schema.returns
        if len(targets) == 1 and len(returned) == 1 and returned[0].alias_info is not None:
            return targets[0]
        return result  # of some ops in place it is no target: ``rrelu_with_noise`` writes its noise

    def _with_picks(self, name: str, args: Any, result: Any) -> Any:
        """``result`` with indices that are made up: balanced, row i takes (i * k + j) mod n for its j-th pick among n,
        or by the guess."""
        indices = tensors_in(result)[-1]
        place, default = _PICKS[name]
        source = args[0]
        dim = default if place is None or len(args) <= place or args[place] is None else args[place]
        if indices.is_floating_point() or source.dim() == 0 or isinstance(dim, bool | torch.Tensor):
            return result
        self.picked = self._made_up = True
        n = max(int(source.shape[dim]), 1)
        tokens = source.numel() // n
        k = indices.numel() // max(tokens, 1)
        routed = source.dim() > 1 and dim in (-1, source.dim() - 1) and n > k >= 1
        self.routed &= routed
        with _disable_current_modes():
            picks = torch.empty_strided(indices.shape, indices.stride(), dtype=indices.dtype, device=indices.device)
            # A whole row (k = n) comes out as 0, 1, 2 ...
            rows = picks.movedim(dim, -1) if indices.dim() == source.dim() else picks
            made = route(self._guess.routing, tokens, k, n) if routed else torch.arange(picks.numel(), device="cpu") % n
            rows.copy_(made.reshape(rows.shape))
        if isinstance(result, torch.Tensor):
            return picks
        return type(result)([*result[:-1], picks]) if type(result) in (list, tuple) else (*result[:-1], picks)


def _asks_values(func: Any, args: Any) -> bool:
    """Whether the shape or the Python value that ``func`` returns depends on the values of its arguments."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    return func is not aten.index.Tensor or any(i is not None and _is_mask(i) for i in args[1])


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _is_wanted(tensor: torch.Tensor) -> bool:
    """Whether the values of ``tensor`` are worth their memory."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.numel() <= LARGEST_FLOAT
    return tensor.nbytes <= LARGEST_INTEGER


def _faked(arguments: Any) -> Any:
    """``arguments`` with fakes for all tensors."""
    mode = cast(FakeTensorMode, detect_fake_mode())  # ops run under one
    return tree_map_only(torch.Tensor, lambda t: t if is_fake(t) else stand_in(mode, t), arguments)


def _is_unknown_to_torch(func: Any, args: Any) -> bool:
    return func is aten._grouped_mm.default and args[0].dtype is not torch.bfloat16


def _grouped_mm(args: Any, kwargs: Any) -> torch.Tensor:
    """The fake result of ``_grouped_mm``, of which torch's own (2.13) knows bfloat16 only; kernels take others too.

    (rows, k) by (groups, k, n) gives (rows, n), (m, rows) by (rows, n) gives (groups, m, n), three dimensions each
    are a batched product. Rows are padded to a multiple of 16 bytes, as in
    ``aten/src/ATen/native/GroupedMMUtils.h``.
    """
    a, b = args[0], args[1]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    dtype = kwargs.get("out_dtype") or a.dtype
    if a.dim() == 2 and b.dim() == 2:
        shape = (offsets.shape[0], a.shape[0], b.shape[1])
    else:
        shape = (*a.shape[:-1], b.shape[-1])
    unit = 16 // dtype.itemsize
    row = (shape[-1] + unit - 1) // unit * unit
    stride = (shape[-2] * row, row, 1) if len(shape) == 3 else (row, 1)
    return torch.empty_strided(shape, stride, dtype=dtype, device=a.device)
