"""What may be kept as codes of fewer bits, what that costs, and plans that do so. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.checking import check
from forebay.compression import CODE_BITS, CODE_DTYPES
from forebay.errors import ConfigError
from forebay.layout import MOVED_LEAST
from forebay.memory import Kind
from forebay.planners import Problem, make_plan
from forebay.planners.activations.coding import Coded, changes, codable
from forebay.planners.activations.items import Item, Items, items_of
from forebay.planners.activations.menu import Option, menu, thresholds
from forebay.plans import Plan
from forebay.simulation import Costs
from forebay.states import Masters
from forebay.trace import NO_SAVES, Op, Segment, Tensor, Trace
from forebay.treatments import Fate, Selection, Treatment
from tests.null.planning import asked, chain, machine

pytestmark = pytest.mark.usefixtures("short_searches")

SIZE = 65536
"""Bytes of what is large."""

BITS = pytest.mark.parametrize("bits", CODE_BITS)
EACH = st.sampled_from(CODE_BITS)


class Forward:
    """The forward of a block, op by op; -1 is what comes in."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.names: list[str] = []

    def make(self, name: str, inputs: Sequence[int], *sizes: int, dtype: str = "float32") -> int:
        """An op with results of ``sizes`` bytes; returns the first."""
        first = len(self.tensors)
        for nbytes in sizes:
            self.tensors.append(Tensor(nbytes, dtype, Kind.ACTIVATION, len(self.tensors), saved=True))
        self._ran(name, inputs, range(first, len(self.tensors)))
        return first

    def view(self, of: int) -> int:
        self.tensors.append(Tensor(SIZE, "float32", Kind.ACTIVATION, of))
        self._ran("aten.view.default", [of], [len(self.tensors) - 1])
        return len(self.tensors) - 1

    def _ran(self, name: str, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        self.ops.append(Op(0, tuple(inputs), tuple(outputs)))
        self.names.append(name)

    def codable(self, *leaves: int, again: bool = False) -> frozenset[int]:
        """The roots that may be codes; all but ``leaves`` go with the last op."""
        gone = tuple(r for r, t in enumerate(self.tensors) if t.root == r and r not in leaves)
        ops = (*self.ops[:-1], replace(self.ops[-1], dropped=gone))
        return codable(Segment(ops, tuple(self.tensors), NO_SAVES), self.names, again=again)


# What may be codes.


def test_what_stays_in_the_block_and_is_large_may_be() -> None:
    f = Forward()
    a = f.make("aten.mm.default", [-1], SIZE)
    f.make("aten.mul.Tensor", [a], MOVED_LEAST - 4)  # too small for anything
    b = f.make("aten.gelu.default", [a], SIZE, dtype="bfloat16")
    leaves = f.make("aten.mm.default", [b], SIZE)
    assert f.codable(leaves) == {a, b} == f.codable(leaves, again=True)


@pytest.mark.parametrize("dtype", ["int64", "bool", "float64", "complex64", "float8_e4m3fn"])
def test_only_what_the_codec_reads_may_be(dtype: str) -> None:
    f = Forward()
    f.make("aten.mm.default", [-1], SIZE, dtype=dtype)
    assert f.codable() == frozenset()
    assert dtype not in CODE_DTYPES


def test_of_several_large_results_none_may_be() -> None:
    """A plan names an op, not one of its results."""
    f = Forward()
    f.make("aten.native_layer_norm.default", [-1], SIZE, MOVED_LEAST, MOVED_LEAST)
    one = f.make("aten.native_layer_norm.default", [-1], SIZE, 64, 64)
    assert f.codable() == {one}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", ["flash_attention", "efficient_attention", "flash_attention_for_cpu"])
def test_what_attention_saves_or_makes_may_not_be(kind: str, again: bool) -> None:
    """Queries are a view of what a projection has made: that may not be, either."""
    f = Forward()
    query, key, value = (f.make("aten.mm.default", [-1], SIZE) for _ in range(3))
    seen = f.view(query)
    out = f.make(f"aten._scaled_dot_product_{kind}.default", [seen, key, value], SIZE, MOVED_LEAST)
    after = f.make("aten.mm.default", [out], SIZE)
    assert f.codable(again=again) == {after}


@pytest.mark.parametrize("name", ["_softmax", "_log_softmax", "_safe_softmax", "logsumexp"])
def test_a_softmax_is_not_and_nothing_before_it_in_a_block_that_runs_again(name: str) -> None:
    """A mask may have minus infinity in it: the codes of its group would be no numbers."""
    f = Forward()
    scores = f.make("aten.bmm.default", [-1], SIZE)
    masked = f.make("aten.add.Tensor", [scores], SIZE)
    shares = f.make(f"aten.{name}.default", [masked], SIZE)
    value = f.make("aten.mm.default", [-1], SIZE)
    out = f.make("aten.bmm.default", [shares, value], SIZE)
    assert f.codable() == {scores, masked, value, out}
    assert f.codable(again=True) == {value, out}


@pytest.mark.parametrize("name", ["mean", "var", "std", "norm", "linalg_vector_norm", "rsqrt", "sqrt"])
def test_statistics_are_not(name: str) -> None:
    """Nor what follows from them alone; what they are applied to is."""
    f = Forward()
    x = f.make("aten.mm.default", [-1], SIZE)
    mean = f.make(f"aten.{name}.dim", [x], MOVED_LEAST)
    shifted = f.make("aten.add.Tensor", [f.view(mean)], MOVED_LEAST)
    f.make("aten.pow.Tensor_Scalar", [shifted], MOVED_LEAST)
    normed = f.make("aten.mul.Tensor", [x, shifted], SIZE)
    assert f.codable() == {x, normed} == f.codable(again=True)


def test_what_is_divided_by_is_not() -> None:
    f = Forward()
    above, below, positive = (f.make("aten.mm.default", [-1], SIZE) for _ in range(3))
    ratio = f.make("aten.div.Tensor", [above, below], SIZE)
    logarithm = f.make("aten.log.default", [f.view(positive)], SIZE)
    scaled = f.make("aten.div.Scalar", [logarithm], SIZE)
    assert f.codable() == {above, ratio, logarithm, scaled}


def test_what_picks_an_expert_is_not_in_a_block_that_runs_again() -> None:
    f = Forward()
    x = f.make("aten.mm.default", [-1], SIZE)
    scores = f.make("aten.mm.default", [x], SIZE)
    chosen = f.make("aten.argmax.default", [scores], SIZE, dtype="int64")
    other = f.make("aten.mm.default", [-1], SIZE)
    out = f.make("aten.index.Tensor", [other, chosen], SIZE)
    assert f.codable() == {x, scores, other, out}
    assert f.codable(again=True) == {other, out}


def test_a_mask_of_dropout_picks_nothing() -> None:
    f = Forward()
    x = f.make("aten.mm.default", [-1], SIZE)
    mask = f.make("aten.native_dropout.default", [x], SIZE // 4, dtype="bool")
    out = f.make("aten.mul.Tensor", [x, mask], SIZE)
    assert f.codable() == {x, out} == f.codable(again=True)


# What it costs.


def layer_items(bits: int, on: object = None) -> Items:
    trace = chain(1, activation=SIZE)
    costs = Costs(trace, machine() if on is None else on, Masters.WHOLE)  # type: ignore[arg-type]
    named = {("linear", i): i for i in range(3)}
    return items_of(costs, trace.segments[trace.visits[0].segment], named, recomputes=True, bits=bits)


def coded_nbytes(nbytes: int, bits: int) -> int:
    """Bytes of fp32 numbers as codes: two of them for each group of 256, and the bits."""
    return 2 * 4 * -(-nbytes // 1024) + nbytes // 4 * bits // 8


@BITS
def test_bytes_and_seconds_of_an_item(bits: int) -> None:
    """A link of 1e8 bytes/s each way, 1e10 on the device: at least what is read and written once, either way."""
    items = layer_items(bits)
    assert items.again is not None
    for item in (*items.kept, *items.again):
        codes = item.codes
        assert codes is not None and codes.bits == bits
        assert codes.held == codes.moved == item.least == coded_nbytes(SIZE, bits)
        assert codes.out_seconds == codes.back_seconds == pytest.approx(codes.moved / 1e8)
        assert codes.encode_seconds > codes.decode_seconds > (SIZE + codes.moved) / 1e10
    assert all(item.codes is None for item in layer_items(0).kept)


@given(st.sampled_from(CODE_DTYPES), EACH, st.integers(MOVED_LEAST, 1 << 30))
def test_codes_never_take_more_than_what_they_stand_for(dtype: str, bits: int, nbytes: int) -> None:
    """8 of 16 bits and two numbers in 256: at most 0.51 of it, and a byte or two for what fills no group."""
    whole = Tensor(nbytes // 4 * 4, dtype, Kind.ACTIVATION, 0)
    costs = Costs(chain(1), machine(), Masters.WHOLE)
    held = Coded.of(costs, [whole], whole.nbytes, bits).held
    assert held <= 0.51 * whole.nbytes + 8 < whole.nbytes


@BITS
def test_codes_are_in_the_menu_where_they_gain_and_only_there(bits: int) -> None:
    """On the device they take less and cost compute; so of two choices for the same op neither beats the other. Where
    compute is dear and the link is free there are none: to move takes less of everything."""
    options = menu(layer_items(bits))
    assert not any(t.lossy for o in options if o.seconds + o.encode_seconds == 0 for t in o.treatments)
    plain = menu(layer_items(0))
    for option in options:
        if any(t.lossy for t in option.treatments):
            beaten = [o for o in plain if all(a <= b for a, b in zip(o.axes, option.axes, strict=True))]
            assert not beaten
    assert any(t.lossy for o in options for t in o.treatments)
    free = layer_items(bits, machine(h2d=1e15, d2h=1e15))
    moved = min(o.held + 1e9 * o.out_seconds for o in menu(free))
    assert moved == pytest.approx(0, abs=1)


def test_what_may_be_done_in_an_option() -> None:
    """All codes, kept or moved, are among the vertices."""
    items = layer_items(4)
    found = {tuple((t.fate, t.bits) for t in o.treatments): o for o in thresholds(items) if not o.recompute}
    size = 3 * coded_nbytes(SIZE, 4)
    kept, moved = found[((Fate.KEEP, 4),) * 3], found[((Fate.OFFLOAD, 4),) * 3]
    assert (kept.held, kept.moved, moved.held, moved.moved) == (size, 0, 0, size)
    assert kept.workspace == moved.workspace == 3 * SIZE  # decoded again
    assert kept.out_seconds == 0 < moved.out_seconds
    assert kept.encode_seconds == sum(i.codes.encode_seconds for i in items.kept if i.codes)
    assert kept.seconds == sum(i.codes.decode_seconds for i in items.kept if i.codes)


def test_what_may_not_be_codes_is_kept_beside_those_that_may() -> None:
    first, *rest = layer_items(8).kept
    mixed = Items((replace(first, codes=None), *rest))
    options: list[Option] = [o for o in thresholds(mixed) if any(t.bits for t in o.treatments)]
    named = {tuple((t.occurrence, t.fate, t.bits) for t in o.treatments) for o in options}
    assert named == {
        ((1, Fate.KEEP, 8), (2, Fate.KEEP, 8)),
        ((0, Fate.OFFLOAD, 0), (1, Fate.OFFLOAD, 8), (2, Fate.OFFLOAD, 8)),
    }


def test_the_least_of_an_item_is_below_all_that_may_be_done_with_it() -> None:
    """Small results stay where codes move: what moves is the least."""
    costs = Costs(chain(1), machine(), Masters.WHOLE)
    codes = Coded.of(costs, [Tensor(SIZE, "float32", Kind.ACTIVATION, 0)], SIZE + 64, 4)
    item = Item("op", 0, 0.0, SIZE + 64, SIZE + 64, SIZE + 64, 1.0, 1.0, codes=codes)
    assert item.least == codes.moved == codes.held - 64


# In words.


def test_the_sentence_of_what_changes() -> None:
    ways = tuple(Treatment(f"aten.{op}.default", 0, Fate.KEEP, bits) for op, bits in (("mm", 4), ("gelu", 4)))
    moved = Treatment("aten.silu.default", 0, Fate.OFFLOAD, 8)
    plain = Treatment("aten.add.Tensor", 0, Fate.OFFLOAD)
    mask = Treatment("aten.relu.default", 0, Fate.KEEP, 1)
    activations = (Selection(("a", "b", "c"), ways), Selection(("d",), (moved, plain, mask)))
    by = "stochastically rounded: results of"
    source = "(ActNN, Chen et al., 2021; GACT, Liu et al., 2022)"
    assert changes(activations) == (
        f"backward reads activations that were kept as 8 bits an element, {by} silu in block d {source}",
        f"backward reads activations that were kept as 4 bits an element, {by} gelu, mm in 3 blocks (a to c) {source}",
    )
    assert changes((Selection(("d",), (plain, mask)),)) == ()


# Plans.


def lossy(plan: Plan) -> list[Treatment]:
    return [t for s in plan.activations for t in s.treatments if t.lossy]


def squeezed(bits: int) -> tuple[Trace, Problem]:
    """Four layers of 8 MiB each, with room for 24, where to run again and to move take far longer than codes."""
    trace = chain(4, activation=32 * SIZE)
    slow = machine(compute=1e8, h2d=1e7, d2h=1e7)
    standing = sum(16 * b.trainable_numel for b in trace.model.blocks)
    return trace, replace(asked(trace, slow, device=standing + (24 << 20)), compress=bits)


@pytest.mark.thinned(2)
@BITS
def test_a_plan_holds_codes_where_they_gain_and_says_so(bits: int) -> None:
    trace, problem = squeezed(bits)
    assert problem.machine is not None
    plan, plain = make_plan(problem, "auto"), make_plan(replace(problem, compress=0), "auto")
    assert {t.bits for t in lossy(plan)} == {bits}
    assert plan.changes_numbers == changes(plan.activations) != ()
    assert plan.step_seconds is not None and plain.step_seconds is not None
    assert plan.step_seconds < plain.step_seconds
    assert not lossy(plain) and not plain.changes_numbers
    check(trace, problem.machine, plan)
    reasons = "\n".join(plan.reasons)
    assert f"keeping activations as {bits} bits saves" in reasons
    assert f"as {bits} bits: " in reasons


@BITS
def test_a_plan_with_room_for_everything_holds_none(bits: int) -> None:
    _, problem = squeezed(bits)
    roomy = replace(problem, budget=replace(problem.budget, device=1 << 40))
    plan = make_plan(roomy, "auto")
    *reasons, last = plan.reasons
    assert last == f"activations may be kept as {bits} bits, and nothing would be gained by it"
    assert replace(plan, reasons=tuple(reasons)) == make_plan(replace(roomy, compress=0), "auto")


@pytest.mark.parametrize("policy", ["keep", "chen", "offload-all", "recompute"])
def test_only_auto_makes_codes(policy: str) -> None:
    _, problem = squeezed(2)
    roomy = replace(problem, budget=replace(problem.budget, device=1 << 40))
    assert make_plan(roomy, policy) == make_plan(replace(roomy, compress=0), policy)


@pytest.mark.parametrize(
    ("room", "link", "kind", "bits"),
    [(8, 1e8, "cpu", 8), (11, 1e7, "cpu", 2), (14, 1e7, "cuda", 4), (14, 1e8, "cuda", 2)],
)
def test_leave_to_change_numbers_never_makes_a_plan_slower(room: int, link: float, kind: str, bits: int) -> None:
    """Three layers that save 48 MiB, with room for ``room`` sixteenths of it. What is as fast as without is without."""
    trace = chain(3, activation=64 * SIZE)
    standing = sum(16 * b.trainable_numel for b in trace.model.blocks)
    on = machine(compute=1e8, h2d=link, d2h=link, kind=kind)
    problem = asked(trace, on, device=standing + room * (3 << 20))
    plain, plan = make_plan(problem, "auto"), make_plan(replace(problem, compress=bits), "auto")
    check(trace, on, plan)
    assert bool(plan.changes_numbers) is bool(lossy(plan))
    assert plan.step_seconds is not None and plain.step_seconds is not None
    assert plan.step_seconds < plain.step_seconds if lossy(plan) else plan.step_seconds <= plain.step_seconds


@pytest.mark.parametrize("bits", [1, 3, 5, 6, 7, 16, 32, -8, True])
def test_other_bits_are_refused(bits: int) -> None:
    _, problem = squeezed(8)
    with pytest.raises(ConfigError, match=r"compress must be 0 \(nothing\), 8, 4 or 2 bits, got"):
        replace(problem, compress=bits)
