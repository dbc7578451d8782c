"""Hypothesis strategies: random but valid traces, machines and plans. No torch.

``traces`` has blocks that are alike (shared segments), frozen parameters, 16-bit ones, a block that is used twice, a
tied parameter (a block whose parameter a later visit reads), a held block around all others, views, temporaries,
buffers, micro-batch inputs. ``plans(trace)`` places every block anywhere that is allowed and fills in the peaks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from forebay.arenas import arenas, home_nbytes
from forebay.budgets import Budget, DiskBudget
from forebay.layout import PAGE, align
from forebay.machine import Curve, Disk, Link, Machine
from forebay.memory import Kind, Tier
from forebay.model import Block, Parameter
from forebay.plans import Placement, Plan, Streaming
from forebay.trace import Phase, Trace
from forebay.treatments import Fate, Selection, Split, Treatment
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace, made_bytes, peak_live
from tests.null.treated_bytes import coded_bytes, moved_bytes, treated_roots

__all__ = [
    "HOMES",
    "Case",
    "cases",
    "machines",
    "models",
    "plan_for",
    "plans",
    "recomputable",
    "roomy",
    "roomy_machine",
    "selections",
    "traces",
]

RESIDENT = (Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)
HOMES = (
    RESIDENT,
    *((home, Tier.HOST, states) for home in (Tier.DEVICE, Tier.HOST, Tier.DISK) for states in (Tier.HOST, Tier.DISK)),
)
"""(parameters, gradients, states) of every placement that is allowed."""

DTYPES = ("float32", "bfloat16")
ENOUGH = 1 << 50


@dataclass(frozen=True)
class Case:
    """What ``check``, ``lower`` and ``simulate`` are given."""

    trace: Trace
    machine: Machine
    plan: Plan


@st.composite
def _parameters(draw: st.DrawFn) -> tuple[tuple[tuple[int, ...], str, bool], ...]:
    dtype = draw(st.sampled_from(DTYPES))
    shapes = draw(st.lists(st.sampled_from([(8,), (3, 5), (16, 16), (40, 64), (1300,)]), min_size=1, max_size=3))
    return tuple((shape, dtype, draw(st.integers(0, 3)) > 0) for shape in shapes)


@st.composite
def _layer(draw: st.DrawFn) -> Layer:
    # Up to 12 KiB: what is smaller than 4 KiB is never moved to the host.
    sizes = st.integers(1, 64).map(lambda n: 64 * n) | st.sampled_from([4096, 4160, 8192, 12288])
    return Layer(
        block="",
        saved=tuple(draw(st.lists(sizes, min_size=1, max_size=3))),
        temporary=draw(st.just(0) | sizes),
        out=draw(sizes),
        view=draw(st.booleans()),
        dtype=draw(st.sampled_from(DTYPES)),
        late=draw(st.booleans()),
        behind=draw(st.booleans()),
    )


def _named(name: str, layer: Layer, reads: tuple[int, ...] | None = None) -> Layer:
    return replace(layer, block=name, reads=reads)


@st.composite
def models(draw: st.DrawFn) -> tuple[tuple[Block, ...], tuple[Layer, ...]]:
    """Blocks, and the layers that use them in order."""
    kinds = draw(st.lists(st.tuples(_parameters(), _layer()), min_size=1, max_size=2))
    chosen = draw(st.lists(st.sampled_from(range(len(kinds))), min_size=1, max_size=4))
    blocks = [block(f"layers.{i}", *kinds[kind][0]) for i, kind in enumerate(chosen)]
    layers = [_named(b.name, kinds[kind][1]) for b, kind in zip(blocks, chosen, strict=True)]
    if draw(st.booleans()):  # a module that runs a second time
        layers.insert(draw(st.integers(0, len(layers))), draw(st.sampled_from(layers)))
    around = draw(st.sampled_from(["nothing", "tied", "held", "outside"]))
    edge = draw(_layer())
    if around == "tied":
        tied = block("embed", ((16, 16), draw(st.sampled_from(DTYPES)), True))
        blocks.insert(0, replace(tied, modules=("embed", "head")))
        layers = [_named("embed", edge), *layers, _named("embed", draw(_layer()))]
    elif around == "held":
        own = ((24,), draw(st.sampled_from(DTYPES)), True)
        blocks.insert(0, block("root", own, own, held=True))
        layers = [_named("root", edge, (0,)), *layers, _named("root", draw(_layer()), (1,))]
    elif around == "outside":  # ops of no block
        layers.insert(draw(st.integers(0, len(layers))), _named("", edge))
    return tuple(blocks), tuple(layers)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """The step of a random chain; see ``tracing.chain_trace`` and ``tracing.validate``."""
    blocks, layers = draw(models())
    return chain_trace(
        blocks,
        layers,
        device=draw(st.sampled_from(["cpu", "cuda"])),
        input_nbytes=draw(st.integers(1, 4096)),
        buffer_nbytes=draw(st.sampled_from([0, 100, 4096])),
        held_nbytes=draw(st.sampled_from([0, 0, 640])),
        unseen_nbytes=draw(st.sampled_from([0, 0, 640])),
        state_names=draw(st.sampled_from([(), ("momentum_buffer",), ("exp_avg", "exp_avg_sq")])),
    )


@st.composite
def _links(draw: st.DrawFn) -> Link:
    rates = draw(st.lists(st.floats(1e6, 1e10), min_size=1, max_size=3))
    return Link(Curve(tuple((4096 * 16**i, rate) for i, rate in enumerate(rates))), draw(st.sampled_from([0.0, 1e-5])))


def roomy_machine(device: str = "cuda", disk: bool = True) -> Machine:
    """One machine with room for anything: 1 TFLOP/s, 1 GB/s everywhere."""
    link = Link(Curve(((4096, 1e9),)))
    return Machine(
        name="roomy",
        source="catalogue",
        device_kind=device,
        device_capacity=ENOUGH,
        host_capacity=ENOUGH,
        pinned_capacity=ENOUGH if device == "cuda" else 0,
        compute=dict.fromkeys(DTYPES, 1e12),
        device_bandwidth=1e9,
        host_bandwidth=1e9,
        update_rate=1e9,
        h2d=link,
        d2h=link,
        disk=Disk(ENOUGH, link, link) if disk else None,
    )


@st.composite
def machines(draw: st.DrawFn, device: str = "cuda", disk: bool | None = None) -> Machine:
    """A machine with room for anything; its rates are of a size with what the random traces move."""
    rate = st.floats(1e6, 1e10)
    with_disk = draw(st.booleans()) if disk is None else disk
    drawn = Machine(
        name="drawn",
        source="measured",
        device_kind=device,
        device_capacity=ENOUGH,
        host_capacity=ENOUGH,
        pinned_capacity=ENOUGH if device == "cuda" else 0,
        compute={"float32": draw(rate), "bfloat16": draw(rate)},
        device_bandwidth=draw(rate),
        host_bandwidth=draw(rate),
        update_rate=draw(rate),
        h2d=draw(_links()),
        d2h=draw(_links()),
        duplex=draw(st.sampled_from([1.0, 0.6])),
        shared_cores=draw(st.sampled_from([0.0, 0.5, 1.0])),
        launch_seconds=draw(st.sampled_from([0.0, 1e-5])),
        watch_seconds=draw(st.sampled_from([0.0, 1e-5])),
        handover_seconds=draw(st.sampled_from([0.0, 1e-4])),
        together_seconds=draw(st.sampled_from([0.0, 1e-5])),
        disk=Disk(ENOUGH, draw(_links()), draw(_links())) if with_disk else None,
    )
    # All kinds of all figures without more draws: each has its own in half of the machines.
    return replace(
        drawn,
        replay_seconds=10 * drawn.launch_seconds,
        treat_seconds=drawn.watch_seconds,
        offload=drawn.h2d if drawn.handover_seconds else None,
    )


def recomputable(trace: Trace) -> tuple[str, ...]:
    """Blocks that are one module, which runs, not around others: what can be recomputed as a whole."""
    used = {v.block for v in trace.visits}
    return tuple(b.name for b in trace.model.blocks if b.module is not None and b.name in used)


def _names(trace: Trace, block: str) -> list[tuple[str, int, bool]]:
    """(op, occurrence, whether it may move to the host without recomputation) of what a plan may name in every forward
    of ``block``: of a chain, all but views."""
    found: list[set[tuple[str, int, bool]]] = []
    for visit in trace.visits:
        if visit.block == block and visit.phase is Phase.FORWARD:
            segment = trace.segments[visit.segment]
            names = [trace.works[op.work].op for op in segment.ops]
            made = [segment.tensors[op.outputs[0]] for op in segment.ops]
            found.append(
                {
                    (name, names[:i].count(name), tensor.saved or tensor.nbytes < 4096)
                    for i, (name, tensor) in enumerate(zip(names, made, strict=True))
                    if name != "view"
                }
            )
    return sorted(set.intersection(*found)) if found else []


@st.composite
def selections(draw: st.DrawFn, trace: Trace, recompute: frozenset[str], disk: bool = True) -> tuple[Selection, ...]:
    """Any treatments that are valid for ``trace`` when the blocks of ``recompute`` recompute."""
    chosen: dict[tuple[Treatment, ...], list[str]] = {}
    leaving = [Fate.OFFLOAD, Fate.DISK] if disk else [Fate.OFFLOAD]
    parts = st.sampled_from([None, None, Split(1, 2), Split(3, 4), Split(1, 9), Split(49, 50)])
    how = st.tuples(st.sampled_from(leaving), st.sampled_from([0, 0, 2, 4, 8]), parts)
    how |= st.tuples(st.just(Fate.KEEP), st.just(4), parts)
    for name in recomputable(trace):
        again = name in recompute
        ops = [(op, occurrence) for op, occurrence, movable in _names(trace, name) if again or movable]
        ways = how | st.just((Fate.KEEP, 0, None)) if again else how
        picked = draw(st.dictionaries(st.sampled_from(ops), ways)) if ops else {}
        if picked:
            treatments = tuple(Treatment(*op, *way) for op, way in sorted(picked.items()))
            chosen.setdefault(treatments, []).append(name)
    return tuple(Selection(tuple(blocks), treatments) for treatments, blocks in chosen.items())


@st.composite
def plans(draw: st.DrawFn, trace: Trace, disk: bool = True, recompute: bool = True, activations: bool = False) -> Plan:
    """Any plan that is valid for ``trace``: what must be on the device fits in a slot, what passes the host fits in a
    host slot; the device's predicted peak is an upper bound, the others are exact; budgets are exactly that, or more.
    ``activations``: with treatments of single ops.
    """
    homes = [h for h in HOMES if disk or Tier.DISK not in h]
    held = [h for h in homes if h[0] is Tier.DEVICE]  # in use while the others stream
    placements = tuple(Placement(b.name, *draw(st.sampled_from(held if b.held else homes))) for b in trace.model.blocks)
    streamed = [trace.model.block(p.block) for p in placements if p.parameters is not Tier.DEVICE]
    on_disk = [trace.model.block(p.block) for p in placements if p.parameters is Tier.DISK]
    again = draw(st.sets(st.sampled_from(names))) if recompute and (names := recomputable(trace)) else set[str]()
    treated = draw(selections(trace, frozenset(again), disk)) if activations else ()
    moved, written = (moved_bytes(trace, treated, fate) for fate in (Fate.OFFLOAD, Fate.DISK))
    ring = draw(st.sampled_from([0, 4096, 20_480])) + align(max(written), PAGE) if written else 0
    streaming = Streaming(
        slots=draw(_slots(streamed)),
        host_slots=(max(map(home_nbytes, on_disk)),) * draw(st.integers(1, 3)) if on_disk else (),
        prefetch_distance=draw(st.integers(0, 4)),
        gradient_window=draw(st.sampled_from([0, 1, 1_000, 5_000, 40_000])),
        offload_window=draw(st.sampled_from([0, 4096, 20_000])) if moved or written else 0,
        reload_window=draw(st.sampled_from([0, 4096, 20_000])) if moved or written else 0,
        host_activations=sum(align(nbytes) for nbytes in moved) + draw(st.sampled_from([0, 64])) if moved else 0,
        disk_activations=sum(align(nbytes, PAGE) for nbytes in written),
        disk_window=ring,
        update_chunk=draw(st.sampled_from([1024, 3000, 4_194_304])),
        overlap_update=draw(st.booleans()),
        checksums=draw(st.booleans()),
    )
    return plan_for(trace, placements, streaming, tuple(sorted(again)), treated, roomy=draw(st.booleans()))


def _slots(streamed: list[Block]) -> st.SearchStrategy[tuple[int, ...]]:
    if not streamed:
        return st.just(())
    sizes = sorted({b.nbytes for b in streamed})
    smaller = st.lists(st.sampled_from([*sizes, sizes[-1] + 64]), max_size=3)
    return smaller.map(lambda more: tuple(sorted([sizes[-1], *more], reverse=True)))


def plan_for(
    trace: Trace,
    placements: tuple[Placement, ...],
    streaming: Streaming,
    recompute: tuple[str, ...] = (),
    activations: tuple[Selection, ...] = (),
    *,
    roomy: bool = False,
) -> Plan:
    """A plan with its peaks filled in; budgets are those peaks, or far more (``roomy``)."""
    sizes = arenas(trace.model, placements, streaming, trace.state_names)
    on_device = sum(t.nbytes for t in trace.sources if t.kind is Kind.INPUT) if trace.device == "cuda" else 0
    live = peak_live(trace) + trace.held_nbytes + trace.unseen_nbytes
    if recompute:  # never more than what a forward of the block makes, beside what was there
        made = made_bytes(trace)
        live += max(_visit_bytes(trace, made, name) for name in recompute)
    # What moves may be there twice: on its way out and back, as a whole if a part of it does, and the rest beside it;
    # what is named may outlive what it would have been.
    moved = [whole for _, fate, whole in treated_roots(trace, activations) if fate is not Fate.KEEP]
    rests = [whole - one[0] for one, _, whole in treated_roots(trace, activations)]
    live += (
        2 * sum(moved)
        + sum(rests)
        + (sum(made_bytes(trace).values()) + sum(coded_bytes(trace, activations))) * bool(activations)
    )
    # The update of a resident block widens 16-bit gradients on the device, when the step's tensors are gone.
    live = max(live, *(_widened(trace, p.block, streaming.update_chunk) for p in placements if p.resident), 0)
    waiting = max(streaming.gradient_window, _largest_gradient(trace))
    device = sizes.device + trace.model.buffer_nbytes + on_device + waiting + live
    pinned = sizes.host_parameters + sizes.host_gradients + sizes.gradient_staging + sizes.host_slots
    pinned += sizes.host_activations + sizes.activation_ring
    more = 1000 if roomy else 1
    return Plan(
        planner="drawn",
        budget=Budget(
            device * more,
            max(1, sizes.host) * more,
            max(1, pinned) * more if trace.device == "cuda" else None,
            DiskBudget("folder", sizes.disk * more) if sizes.disk else None,
        ),
        placements=placements,
        streaming=streaming,
        device=device,
        host=sizes.host,
        disk=sizes.disk,
        pinned=pinned if trace.device == "cuda" else 0,
        recompute=recompute,
        activations=activations,
        fingerprint=trace.fingerprint,
        changes_numbers=("codes",) if any(t.lossy for s in activations for t in s.treatments) else (),
    )


def roomy(trace: Trace, home: tuple[Tier, Tier, Tier] = (Tier.HOST, Tier.HOST, Tier.HOST), slots: int = 2) -> Plan:
    """Every block at ``home`` (a held one in a slot of its own), ``slots`` shared slots, more room than it needs."""
    blocks = trace.model.blocks
    placements = tuple(Placement(b.name, Tier.DEVICE if b.held else home[0], *home[1:]) for b in blocks)
    streamed = [b for b, p in zip(blocks, placements, strict=True) if p.parameters is not Tier.DEVICE]
    disk = [home_nbytes(b) for b in streamed if home[0] is Tier.DISK]
    streaming = Streaming(
        slots=(max(b.nbytes for b in streamed),) * slots if streamed else (),
        host_slots=(max(disk),) * 2 if disk else (),
        gradient_window=1 << 20,
    )
    return plan_for(trace, placements, streaming, roomy=True)


def _visit_bytes(trace: Trace, made: dict[int, int], name: str) -> int:
    visits = [v for v in trace.visits if v.block == name and v.phase is Phase.FORWARD]
    lengths = [(v.first_tensor, v.first_tensor + len(trace.segments[v.segment].tensors)) for v in visits]
    return max(sum(made.get(i, 0) for i in range(*span)) for span in lengths)


def _widened(trace: Trace, name: str, update_chunk: int) -> int:
    """Bytes of the 16-bit gradients of one chunk in 32 bits: all that a chunk may hold, at most."""
    narrow = [p for p in trace.model.block(name).parameters if p.trainable and p.dtype != "float32"]
    return 4 * min(sum(p.numel for p in narrow), align(update_chunk, 16))


def _largest_gradient(trace: Trace) -> int:
    parameters: list[Parameter] = [p for b in trace.model.blocks for p in b.parameters if p.trainable]
    return max((p.nbytes for p in parameters), default=0)


@st.composite
def cases(draw: st.DrawFn, recompute: bool = True, activations: bool = False) -> Case:
    """A trace, a plan for it and a machine that has what the plan names."""
    trace = draw(traces())
    disk = draw(st.booleans())
    plan = draw(plans(trace, disk, recompute, activations))
    return Case(trace, draw(machines(trace.device, disk or None)), plan)
