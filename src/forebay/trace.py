"""What a training step is made of: every op and tensor of one step of a ``Model``. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256

from forebay.errors import ConfigError
from forebay.memory import Kind
from forebay.model import Model, Parameter

__all__ = [
    "COMPILED",
    "CONSTANT",
    "NO_SAVES",
    "TRACE_SCHEMA",
    "Footprint",
    "Gradient",
    "Leaves",
    "Op",
    "Phase",
    "Segment",
    "Tensor",
    "Trace",
    "Visit",
    "Work",
    "fingerprint_of",
]

TRACE_SCHEMA = 6

COMPILED = "forebay.compiled_"
"""Begins the names of the ops that stand for compiled blocks (``profiler.stand_ins``)."""

CONSTANT = "constant "
"""Begins the names of tensors that some module keeps to itself: no parameter, no buffer, no input."""

_DRAWING = (
    *("bernoulli", "cauchy", "dropout", "exponential", "geometric", "multinomial", "normal", "poisson", "rand"),
    "uniform",
)
"""Parts of the names of ops that draw random numbers."""

NO_SAVES = -1
"""In the place of a number of ops: autograd saves nothing there."""


@dataclass(frozen=True)
class Footprint:
    """Device bytes of one step beside parameters and states: the ``peak`` of activations, temporaries and gradients.

    ``input_nbytes`` are the bytes of the batch, ``note`` says in words why nothing is known.
    ``measured`` says whether the figure comes from a run of the step under fake tensors (True) or is unknown and
    was set to 0 (False): then nothing but the blocks can be promised beforehand.
    """

    peak: int
    input_nbytes: int
    measured: bool
    note: str = ""


class Leaves(StrEnum):
    """What a forward leaves in the modules of its model, where another one finds it (a mask, a count of calls, the
    losses of layers; not what a block's own buffers hold): nothing, only the first one does, or each of them."""

    NOTHING = "nothing"
    ONCE = "once"
    ALWAYS = "always"


class Phase(StrEnum):
    """Which half of a step an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a step.

    ``root`` is the reference of the tensor that owns the storage: itself, unless this is a view. ``nbytes`` are the
    bytes of the storage for a root and the tensor's own for a view. ``saved`` says whether autograd keeps it (or a view
    of it) from forward to backward. ``name`` is set for parameters, buffers and inputs, ``kind`` says which of these it
    is, or what else; ``dtype`` is without ``torch.``.
    """

    nbytes: int
    dtype: str
    kind: Kind
    root: int
    saved: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """What running an op costs, whatever the machine; ops of the same ``signature`` cost the same.

    ``signature`` is the overload with shapes, strides and dtypes of what it is given. ``dtype`` is that of the
    arithmetic. ``flops`` are floating-point operations, a multiply-add two of them, ``nbytes`` the bytes that it reads
    and writes at least; a view has 0 of both.
    """

    op: str
    signature: str
    dtype: str
    flops: int
    nbytes: int

    @property
    def is_compiled(self) -> bool:
        """Whether it is half of a compiled block: no dispatch mode sees it run, so no plan can name it."""
        return self.op.startswith(COMPILED)

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers, by its name. That of attention, which may, does not say."""
        return any(word in self.op for word in _DRAWING)


@dataclass(frozen=True, slots=True)
class Gradient:
    """After an op, the gradient of ``parameter`` is complete and is ``tensor`` (both are references)."""

    parameter: int
    tensor: int


@dataclass(frozen=True, slots=True)
class Op:
    """One op. ``work`` is an index into ``Trace.works``; tensors are references (see ``Segment``): it reads ``inputs``
    and makes ``outputs``.

    What happens after the op and before the next one: ``dropped`` are roots whose last holder outside autograd's
    saved tensors went away, ``unsaved`` are roots that no saved tensor holds any longer. A root is in memory until it
    is dropped and not (or no longer) saved. ``gradients`` are complete after the op. ``packed`` are roots that autograd
    saves here for the first time, in that order: those of its own that an op saves, or that the next one will.

    Where a block is recomputed it matters who saves a root. ``spent`` are roots of which backward has read the last
    tensor that was saved in the very call of a module that makes them; what is made again goes then, which may be an
    op earlier than autograd lets go of what it was given the first time. ``released`` are roots that no tensor saved
    anywhere else holds any longer.
    """

    work: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    unsaved: tuple[int, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    spent: tuple[int, ...] = ()
    released: tuple[int, ...] = ()
    packed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Segment:
    """Consecutive ops of one block in one phase, recorded once for all blocks that are alike.

    A reference of 0 or more is one of the segment's own ``tensors``; -1 - k is the k-th port of the visit.
    ``saves_until`` is, of a block's forward, the number of its ops that have run when autograd saves the last tensor in
    it, parameters and inputs included: as many are run again for backward where the block is recomputed. ``NO_SAVES``:
    backward asks for nothing that is saved in it, so that it is never run again; also of all other segments. ``given``
    are the roots of its arguments: a recomputation keeps them, read or not. ``replaced_nbytes`` are those of tensors
    that were there before the step, as attributes and buffers of its module, and that it puts others in the place of: a
    recomputation keeps these, too.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    saves_until: int
    given: tuple[int, ...] = ()
    replaced_nbytes: int = 0

    @property
    def saves(self) -> bool:
        """Whether backward asks for anything that is saved in it."""
        return self.saves_until != NO_SAVES

    def __post_init__(self) -> None:
        if not NO_SAVES <= self.saves_until <= len(self.ops):
            raise ConfigError(
                f"a segment of {len(self.ops)} ops cannot save its last tensor after {self.saves_until} of them; "
                f"capture the trace again"
            )


@dataclass(frozen=True, slots=True)
class Visit:
    """One run through a segment.

    ``block`` is the streamed block whose module runs, "" outside of all, ``phase`` the half of the step. ``ports`` are
    the ids of the tensors from outside. The segment's own tensors have the ids from ``first_tensor`` on, its ops the
    numbers from ``first_op``. ``kept_until`` is, of a block's forward, the number of the op after which autograd has
    let go of the last tensor that was saved in it (``NO_SAVES``: there is none): until then a recomputation keeps its
    arguments."""

    segment: int
    block: str
    phase: Phase
    ports: tuple[int, ...]
    first_op: int
    first_tensor: int
    kept_until: int = NO_SAVES

    def resolve(self, reference: int) -> int:
        """The id in the trace of what ``reference`` means in this visit."""
        return self.first_tensor + reference if reference >= 0 else self.ports[-1 - reference]


@dataclass(frozen=True)
class Trace:
    """One training step (one micro-batch) of a model on a batch of one shape.

    ``sources`` are the tensors that exist before the step: parameters in the order of ``model.blocks``, then buffers,
    then inputs; the id of a tensor is its place there, and those made in the step have the ids after them. A gradient
    is never dropped in a trace: where it goes is the plan's to say. ``device`` is ``cpu`` or ``cuda``: on ``cpu`` the
    inputs are the host's and take nothing of the device. ``tokens`` are what the user counts: token ids, or samples
    where there are none. ``optimizer`` is its name and ``state_names`` those of its states. ``works``, ``segments`` and
    ``visits`` are the ops: what each costs, how they follow in a block, which blocks are run when. ``notes`` say in
    words what was assumed. ``held_nbytes`` of the step's outputs are still there while the next forward runs;
    ``unseen_nbytes`` may be taken by a loss outside the model, between forward and backward. ``workspace_nbytes`` of
    the device are there whatever the ops make: what libraries keep for their kernels, and what of the allocator's pages
    is nobody's (on ``cuda``, where the step was recorded on a machine that has a card). ``read_in_backward`` names the
    blocks whose parameters a function that the model itself has run again in backward (a checkpoint) reads while
    none of the modules run that ask for them: such a block has to stay on the device. ``compiled`` names the modules,
    blocks as a whole, that are here as a compiler made them: one op in forward and one in backward.
    ``changed_buffers`` names the buffers that the step changes in place: a block that is recomputed keeps a copy of its
    own as forward found them. ``written`` names the parameters that the forward writes to. ``unrepeatable`` names the
    blocks whose forward, in this trace or in one of its ``extremes``, changes in place a tensor that is no buffer, and
    of which nobody keeps what was in it, or takes a gradient, for which it reads what autograd has saved in it: they
    are not recomputed. ``leaves``: see there.

    Where sizes follow from routes that nobody can know beforehand (which experts a router picks), this is the step with
    balanced routes, and ``extremes`` are the same step with the routes that take the most memory; of a step that a
    number decides that is drawn at random (whether a layer is left out), the one with the lowest number. Of a model
    whose forward leaves something in its modules for the next one (a mask that is made once), this is a later step, and
    the first one is an extreme. Seconds and simulated bytes are those of the trace itself. The extremes say only what
    is promised: the most bytes of a plan are the most of any of these traces, each with its own numbers of ops and
    tensors. Empty where all take the same bytes.

    Raises ``ConfigError`` for another schema, and for extremes of another model or batch, or with extremes of their
    own.
    """

    model: Model
    device: str
    optimizer: str
    state_names: tuple[str, ...]
    tokens: int
    sources: tuple[Tensor, ...]
    works: tuple[Work, ...]
    segments: tuple[Segment, ...]
    visits: tuple[Visit, ...]
    held_nbytes: int = 0
    unseen_nbytes: int = 0
    workspace_nbytes: int = 0
    read_in_backward: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    changed_buffers: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    unrepeatable: tuple[str, ...] = ()
    leaves: Leaves = Leaves.NOTHING
    notes: tuple[str, ...] = ()
    extremes: tuple[Trace, ...] = ()
    schema: int = TRACE_SCHEMA

    def __post_init__(self) -> None:
        if self.schema != TRACE_SCHEMA:
            raise ConfigError(
                f"this trace has schema {self.schema}, this forebay reads schema {TRACE_SCHEMA}; capture it again"
            )
        for extreme in self.extremes:
            if extreme.extremes:
                raise ConfigError("an extreme of a trace has extremes of its own; capture the trace again")
            if extreme._origin != self._origin:
                raise ConfigError("an extreme of a trace is of another model or batch; capture the trace again")

    @property
    def _origin(self) -> tuple[Model, list[Tensor], tuple[str, ...], str]:
        """Of what this is a step. What a module keeps to itself is known when it runs, which it may not."""
        given = [tensor for tensor in self.sources if not tensor.name.startswith(CONSTANT)]
        return self.model, given, self.state_names, self.device

    @property
    def routings(self) -> tuple[Trace, ...]:
        """The trace and its extremes: what holds whatever the routes and draws are, holds in each of them."""
        return (self, *self.extremes)

    @property
    def input_nbytes(self) -> int:
        """Bytes of the inputs on the device: on ``cpu`` they are the host's."""
        return sum(t.nbytes for t in self.sources if t.kind is Kind.INPUT) if self.device == "cuda" else 0

    @property
    def outside_nbytes(self) -> int:
        """Bytes of the device, all through a step, of what is neither a plan's to place nor made by an op: buffers,
        inputs, workspaces."""
        return self.model.buffer_nbytes + self.input_nbytes + self.workspace_nbytes

    @property
    def flops(self) -> int:
        """Floating-point operations of one step: a multiply-add counts as two."""
        per_segment = [sum(self.works[op.work].flops for op in s.ops) for s in self.segments]
        return sum(per_segment[v.segment] for v in self.visits)

    @property
    def fingerprint(self) -> str:
        """Names the model, its batch shape and its optimizer: what a plan is made for."""
        inputs = [(t.name, t.dtype, t.nbytes) for t in self.sources if t.kind is Kind.INPUT]
        return fingerprint_of(self.model, inputs, self.state_names)

    def ops(self) -> Iterator[tuple[int, Visit, Op]]:
        """Every op in order of execution: its number, the visit it belongs to, the op."""
        for visit in self.visits:
            for index, op in enumerate(self.segments[visit.segment].ops):
                yield visit.first_op + index, visit, op

    def tensors(self) -> Iterator[tuple[int, Tensor]]:
        """Every tensor with its id, ``root`` resolved to an id: the sources, then what the step makes."""
        yield from enumerate(self.sources)
        for visit in self.visits:
            for index, tensor in enumerate(self.segments[visit.segment].tensors):
                yield visit.first_tensor + index, replace(tensor, root=visit.resolve(tensor.root))

    def to_json(self) -> str:
        """The trace as one JSON object."""
        from forebay.records import dump

        return dump(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Trace:
        """Reads ``to_json``'s text. Raises ``ConfigError`` naming the field that is wrong."""
        from forebay.records import load

        return load(cls, text)


def fingerprint_of(model: Model, inputs: Iterable[tuple[str, str, int]], state_names: tuple[str, ...]) -> str:
    """The fingerprint of a trace of ``model`` on ``inputs`` (name, dtype and bytes of each, in order)."""
    shapes = [(b.name, [_in_fingerprint(p) for p in b.parameters]) for b in model.blocks]
    return sha256(repr((shapes, list(inputs), state_names)).encode()).hexdigest()[:16]


def _in_fingerprint(parameter: Parameter) -> tuple[object, ...]:
    said = parameter.name, parameter.shape, parameter.dtype, parameter.trainable
    of_states = {"no master": not parameter.master, "orthogonal": parameter.orthogonal}
    return (*said, *(word for word, holds in of_states.items() if holds))
