"""Traces made by hand, and the rules that every trace keeps. No torch.

``chain_trace`` builds the step of a chain of layers whose sizes have closed forms; ``validate`` raises where a trace
breaks the rules of ``forebay.trace``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from forebay.memory import Kind
from forebay.model import Block, Model
from forebay.trace import NO_SAVES, Gradient, Op, Phase, Segment, Tensor, Trace, Visit, Work
from tests.null.synthetic import ADAM, block

__all__ = [
    "Layer",
    "TraceBuilder",
    "VisitBuilder",
    "chain_trace",
    "made_bytes",
    "peak_live",
    "unread_trace",
    "validate",
]


@dataclass(frozen=True)
class Layer:
    """One run of a module of ``block``, forward and backward.

    ``saved`` are bytes of the activations it keeps for backward (one op each, at least one), ``temporary`` bytes that
    live during its last op only, ``out`` bytes of its result. ``reads`` are the places of the parameters that it
    reads (None: all of the block's). ``view`` puts a view between two ops. ``dtype`` is that of what it makes.
    ``late`` says that the op that makes the result saves what it is given, a moment before it runs; else the last
    tensor is saved when the last activation is made. ``behind`` says that each activation is saved for the first time
    when the op behind the one that makes it has run; else when it is made.
    """

    block: str
    saved: tuple[int, ...] = (1024,)
    temporary: int = 0
    out: int = 512
    reads: tuple[int, ...] | None = None
    view: bool = False
    dtype: str = "float32"
    late: bool = False
    behind: bool = False


@dataclass
class VisitBuilder:
    """One visit under construction, in ids of the trace; ``TraceBuilder.end`` makes a segment of it."""

    builder: TraceBuilder
    block: str
    phase: Phase
    first_tensor: int
    tensors: list[Tensor] = field(default_factory=list)
    ops: list[dict[str, list[int]]] = field(default_factory=list)
    completed: list[list[Gradient]] = field(default_factory=list)
    works: list[int] = field(default_factory=list)
    saves_until: int = NO_SAVES
    given: tuple[int, ...] = ()

    def make(
        self,
        name: str,
        inputs: Sequence[int],
        nbytes: int,
        kind: Kind = Kind.ACTIVATION,
        *,
        dtype: str = "float32",
        saved: bool = False,
        view_of: int | None = None,
    ) -> int:
        """An op that makes one tensor; returns its id. A view has no flops and no bytes."""
        read = sum(self.builder.nbytes[i] for i in inputs)
        cost = (0, 0) if view_of is not None else (2 * (read + nbytes), read + nbytes)
        work = Work(name, f"{name}({','.join(str(self.builder.nbytes[i]) for i in inputs)})", dtype, *cost)
        made = self.first_tensor + len(self.tensors)
        self.builder.nbytes.append(nbytes)
        root = made if view_of is None else view_of
        self.tensors.append(Tensor(nbytes, dtype, kind, root, saved))
        gone = {name: list[int]() for name in ("dropped", "unsaved", "spent", "released", "packed")}
        self.ops.append({"inputs": list(inputs), "outputs": [made], **gone})
        self.completed.append([])
        self.works.append(self.builder.work(work))
        return made

    def make_beside(self, nbytes: int, *, dtype: str, saved: bool = False) -> int:
        """One more tensor that the last op makes; returns its id."""
        made = self.first_tensor + len(self.tensors)
        self.builder.nbytes.append(nbytes)
        self.tensors.append(Tensor(nbytes, dtype, Kind.ACTIVATION, made, saved))
        self.ops[-1]["outputs"].append(made)
        return made

    def save(self) -> None:
        """Autograd saves a tensor now: after the last op, before the next."""
        self.saves_until = len(self.ops)

    def pack(self, root: int) -> None:
        """After the last op: autograd saves ``root`` for the first time."""
        self.ops[-1]["packed"].append(root)

    def drop(self, *roots: int) -> None:
        """After the last op: nobody but autograd holds ``roots``. Sources are never dropped."""
        self.ops[-1]["dropped"] += [r for r in roots if r >= len(self.builder.sources)]

    def unsave(self, *roots: int, own: bool = False) -> None:
        """After the last op: autograd holds ``roots`` no longer, which were saved where they are made (``own``)."""
        gone = [r for r in roots if r >= len(self.builder.sources)]
        self.ops[-1]["unsaved"] += gone
        self.ops[-1]["spent" if own else "released"] += gone

    def complete(self, parameter: int, tensor: int) -> None:
        """After the last op: the gradient of ``parameter`` is ``tensor``."""
        self.completed[-1].append(Gradient(parameter, tensor))


class TraceBuilder:
    """Puts visits together; those that are alike share a segment."""

    def __init__(self, model: Model, inputs: Mapping[str, int], buffers: Mapping[str, int] | None = None) -> None:
        self.model = model
        named = [(p.name, p.nbytes, p.dtype, Kind.PARAMETER) for b in model.blocks for p in b.parameters]
        named += [(n, size, "float32", Kind.BUFFER) for n, size in (buffers or {}).items()]
        named += [(n, size, "int64", Kind.INPUT) for n, size in inputs.items()]
        self.sources = tuple(Tensor(size, dtype, kind, i, name=n) for i, (n, size, dtype, kind) in enumerate(named))
        self.ids = {t.name: i for i, t in enumerate(self.sources)}
        self.nbytes = [t.nbytes for t in self.sources]
        self.op_count = 0
        self._works: dict[Work, int] = {}
        self._segments: dict[Segment, int] = {}
        self._visits: list[Visit] = []

    def work(self, work: Work) -> int:
        return self._works.setdefault(work, len(self._works))

    def begin(self, block: str, phase: Phase) -> VisitBuilder:
        return VisitBuilder(self, block, phase, len(self.nbytes))

    def end(self, visit: VisitBuilder) -> int:
        """Turns ids into references: of the segment's own tensors, or of ports in the order of first mention. Returns
        the place of the visit."""
        ports: dict[int, int] = {}

        def refer(tensor: int) -> int:
            if tensor >= visit.first_tensor:
                return tensor - visit.first_tensor
            return -1 - ports.setdefault(tensor, len(ports))

        ops = tuple(
            Op(
                work,
                **{name: tuple(map(refer, ids)) for name, ids in raw.items()},
                gradients=tuple(Gradient(refer(g.parameter), refer(g.tensor)) for g in completed),
            )
            for work, raw, completed in zip(visit.works, visit.ops, visit.completed, strict=True)
        )
        tensors = tuple(Tensor(t.nbytes, t.dtype, t.kind, refer(t.root), t.saved) for t in visit.tensors)
        index = self._segments.setdefault(
            Segment(ops, tensors, visit.saves_until, tuple(map(refer, visit.given))), len(self._segments)
        )
        first_op, self.op_count = self.op_count, self.op_count + len(ops)
        made = Visit(index, visit.block, visit.phase, tuple(ports), first_op, visit.first_tensor)
        self._visits.append(made)
        return len(self._visits) - 1

    def let_go(self, visit: int) -> None:
        """Autograd holds nothing any longer of what was saved in ``visit``: after the last op so far."""
        self._visits[visit] = replace(self._visits[visit], kept_until=self.op_count - 1)

    def trace(self, device: str = "cuda", **more: object) -> Trace:
        base: dict[str, object] = {"optimizer": "adamw", "state_names": ADAM, "tokens": 16, **more}
        return Trace(
            model=self.model,
            device=device,
            sources=self.sources,
            works=tuple(self._works),
            segments=tuple(self._segments),
            visits=tuple(self._visits),
            **base,  # type: ignore[arg-type]
        )


def chain_trace(
    blocks: Sequence[Block],
    layers: Sequence[Layer] | None = None,
    *,
    device: str = "cuda",
    input_nbytes: int = 256,
    buffer_nbytes: int = 0,
    tried: bool = False,
    **more: object,
) -> Trace:
    """The step of ``layers`` (None: one per block) in a row, then a loss, then the same backwards. ``tried``: before
    that all layers run once without gradients, one op each, and what the last one makes goes nowhere.

    Forward of a layer: one op per entry of ``saved``, which makes that activation from the one before it and from its
    share of the parameters (places j, j + n, j + 2n ... for op j of n); with ``temporary``, an op that makes that; the
    op that makes ``out``. The layer's input and its temporaries go after its last op. What a layer makes as ``out`` is
    saved by what follows it. Loss: a saved copy of the last ``out`` (softmax) and 4 bytes.

    After the forward of all layers there are, beside sources,
        sum(layer.saved) + sum(layer.out) + last out + 4 bytes.
    Backward of a layer makes, for each op from the last, the gradient of its input (as large as that input; none for
    the step's input), then a gradient per trainable parameter, and unsaves what it no longer needs. A parameter that
    several layers read gets its parts added: the sum is complete in the first of them. Parameters that no layer reads
    have no gradient.
    """
    chain = [Layer(b.name) for b in blocks] if layers is None else list(layers)
    model = Model(tuple(blocks), buffer_nbytes)
    b = TraceBuilder(model, {"input_ids": input_nbytes}, {"buffer": buffer_nbytes} if buffer_nbytes else {})
    reads = [_read_by(model, b.ids, layer) for layer in chain]
    x, kept = b.ids["input_ids"], []
    for number, layer in enumerate(chain if tried else ()):
        v = b.begin(layer.block, Phase.FORWARD)
        out = v.make("linear", [x, *(p for own in reads[number] for p in own)], layer.out)
        v.drop(x, *([out] if number == len(chain) - 1 else []))
        b.end(v)
        x = out
    x = b.ids["input_ids"]
    for layer, parameters in zip(chain, reads, strict=True):
        saved, out, place = _forward(b, layer, parameters, x)
        kept.append((x, saved, place))
        x = out
    v = b.begin("", Phase.FORWARD)
    softmax = v.make("softmax", [x], b.nbytes[x], saved=True)
    v.pack(softmax)
    loss = v.make("nll_loss", [softmax], 4)
    v.drop(x, softmax)
    b.end(v)
    v = b.begin("", Phase.BACKWARD)
    ones = v.make("ones_like", [loss], 4, Kind.TEMPORARY)
    gradient = v.make("softmax_backward", [ones, softmax], b.nbytes[x], Kind.TEMPORARY)
    v.drop(ones, loss)
    v.unsave(softmax, x)
    b.end(v)
    parts: dict[int, int] = {}
    left = Counter(p for parameters in reads for own in parameters for p in own)
    for layer, parameters, (x, saved, place) in zip(reversed(chain), reversed(reads), reversed(kept), strict=True):
        gradient = _backward(b, layer, parameters, x, saved, gradient, parts, left)
        b.let_go(place)
    return b.trace(device, **more)


def _read_by(model: Model, ids: Mapping[str, int], layer: Layer) -> list[list[int]]:
    own = model.block(layer.block).parameters if layer.block else ()
    names = [own[i].name for i in (range(len(own)) if layer.reads is None else layer.reads)]
    return [[ids[n] for n in names[j :: len(layer.saved)]] for j in range(len(layer.saved))]


def _forward(b: TraceBuilder, layer: Layer, parameters: list[list[int]], x: int) -> tuple[list[int], int, int]:
    v = b.begin(layer.block, Phase.FORWARD)
    v.given = (x,)
    saved: list[int] = []
    current = x
    for nbytes, own in zip(layer.saved, parameters, strict=True):
        current = v.make("linear", [current, *own], nbytes, dtype=layer.dtype, saved=True)
        if saved and layer.behind:
            v.pack(saved[-1])
        saved.append(current)
        v.save()
        if not layer.behind:
            v.pack(current)
        if layer.view:
            current = v.make("view", [current], nbytes, dtype=layer.dtype, view_of=current)
    gone = [*saved, x]
    if layer.temporary:
        temporary = v.make("mix", [current], layer.temporary, Kind.TEMPORARY, dtype=layer.dtype)
        gone.append(temporary)
        if layer.behind:
            v.pack(saved[-1])
        if layer.late:
            v.save()
        out = v.make("out", [current, temporary], layer.out, dtype=layer.dtype, saved=True)
    else:
        if layer.late:
            v.save()
        out = v.make("out", [current], layer.out, dtype=layer.dtype, saved=True)
    if layer.behind and not layer.temporary:
        v.pack(saved[-1])
    v.pack(out)
    v.drop(*gone)
    return saved, out, b.end(v)


def _backward(
    b: TraceBuilder,
    layer: Layer,
    parameters: list[list[int]],
    x: int,
    saved: list[int],
    gradient: int,
    parts: dict[int, int],
    left: Counter[int],
) -> int:
    v = b.begin(layer.block, Phase.BACKWARD)
    trainable = {b.ids[p.name] for block in b.model.blocks for p in block.parameters if p.trainable}
    g = v.make("out_backward", [gradient, saved[-1]], b.nbytes[saved[-1]], Kind.TEMPORARY, dtype=layer.dtype)
    v.drop(gradient)
    for j in reversed(range(len(saved))):
        before, made = saved[j - 1] if j else x, g
        # The order of autograd: the gradient of an op's input, then those of its parameters.
        if before >= len(b.sources):
            made = v.make("dgrad", [g, *parameters[j]], b.nbytes[before], Kind.TEMPORARY, dtype=layer.dtype)
        for parameter in parameters[j]:
            if parameter in trainable:
                _parameter_gradient(v, parameter, [g, before], parts, left)
        v.drop(g)
        v.unsave(saved[j], own=True)
        g = made
    v.unsave(x)
    b.end(v)
    return g


def _parameter_gradient(
    v: VisitBuilder, parameter: int, inputs: list[int], parts: dict[int, int], left: Counter[int]
) -> None:
    left[parameter] -= 1
    source = v.builder.sources[parameter]
    alone = left[parameter] == 0 and parameter not in parts
    kind = Kind.GRADIENT if alone else Kind.TEMPORARY
    made = v.make("wgrad", inputs, source.nbytes, kind, dtype=source.dtype)
    if parameter in parts:
        last = left[parameter] == 0
        total = v.make(
            "add",
            [parts[parameter], made],
            source.nbytes,
            Kind.GRADIENT if last else Kind.TEMPORARY,
            dtype=source.dtype,
        )
        v.drop(parts[parameter], made)
        made = total
    parts[parameter] = made
    if left[parameter] == 0:
        v.complete(parameter, made)


def made_bytes(trace: Trace) -> dict[int, int]:
    """Bytes of every root that the step makes."""
    return {i: t.nbytes for i, t in trace.tensors() if t.root == i and i >= len(trace.sources)}


def peak_live(trace: Trace) -> int:
    """Most bytes of made roots during one op, if every gradient goes elsewhere the moment it is complete and nothing
    is recomputed: what an op makes is there beside all that was there before it."""
    sizes, tensors = made_bytes(trace), dict(trace.tensors())
    live: dict[int, int] = {}
    held: Counter[int] = Counter()
    peak = 0
    for _, visit, op in trace.ops():
        for root in map(visit.resolve, op.outputs):
            if root in sizes:
                live[root] = sizes[root]
                held[root] = 1 + tensors[root].saved
        peak = max(peak, sum(live.values()))
        for root in map(visit.resolve, (*op.dropped, *op.unsaved)):
            held[root] -= 1
            if not held[root]:
                live.pop(root)
        for gradient in op.gradients:
            live.pop(tensors[visit.resolve(gradient.tensor)].root, None)
    return peak


def validate(trace: Trace) -> None:
    """Raises ``AssertionError`` where ``trace`` breaks the rules: ids in order, roots born before they are read and
    dropped and unsaved once each, gradients complete once for each trainable parameter that is read."""
    tensors = dict(trace.tensors())
    count = len(trace.sources)
    parameters = [p for b in trace.model.blocks for p in b.parameters]
    assert [t.name for t in trace.sources[: len(parameters)]] == [p.name for p in parameters]
    born, gone, unsaved, complete = set(range(count)), set[int](), set[int](), Counter[int]()
    packed = set[int]()
    read: set[int] = set()
    next_op, next_tensor = 0, count
    for visit in trace.visits:
        assert (visit.first_op, visit.first_tensor) == (next_op, next_tensor)
        next_op += len(trace.segments[visit.segment].ops)
        next_tensor += len(trace.segments[visit.segment].tensors)
        assert all(port < visit.first_tensor for port in visit.ports)
    for _, visit, op in trace.ops():
        for t in map(visit.resolve, op.inputs):
            root = tensors[t].root
            assert t in born and (root not in gone or (tensors[root].saved and root not in unsaved))
            read.add(root)
        outputs = [visit.resolve(t) for t in op.outputs]
        assert not born & set(outputs)
        born |= set(outputs)
        for t in map(visit.resolve, op.packed):
            assert t in born and t not in gone and tensors[t].saved and tensors[t].root == t and t not in packed
            packed.add(t)
        for t in map(visit.resolve, op.dropped):
            assert t >= count and tensors[t].root == t and t in born and t not in gone
            assert tensors[t].kind is not Kind.GRADIENT
            gone.add(t)
        for t in map(visit.resolve, op.unsaved):
            assert t in born and tensors[t].saved and t not in unsaved
            unsaved.add(t)
        complete.update(visit.resolve(g.parameter) for g in op.gradients)
        assert all(tensors[visit.resolve(g.tensor)].kind is Kind.GRADIENT for g in op.gradients)
    roots = {i for i, t in tensors.items() if i >= count and t.root == i}
    assert born == set(tensors)
    assert {r for r in roots if tensors[r].kind is not Kind.GRADIENT} == gone
    assert {r for r in roots if tensors[r].saved} == unsaved == packed
    assert complete == Counter(i for i, p in enumerate(parameters) if p.trainable and i in read)


def unread_trace() -> Trace:
    """One block that is trained and never fetched: its parameter has a gradient that needs no value of it."""
    b = TraceBuilder(Model((block("a", ((32, 32), "float32", True)),), 0), {"input_ids": 256})
    x = b.ids["input_ids"]
    v = b.begin("a", Phase.FORWARD)
    out = v.make("linear", [x], 256)
    b.end(v)
    v = b.begin("a", Phase.BACKWARD)
    v.complete(b.ids["a.0"], v.make("wgrad", [out, x], 4096, Kind.GRADIENT))
    v.drop(out)
    b.end(v)
    return b.trace()
