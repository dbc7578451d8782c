"""How a block's bytes lie, and what a plan asks of every tier: every element once, nothing over anything else."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from forebay.arenas import (
    DISK_BLOCK,
    DISK_BOUNCE,
    GRADIENT_STAGING,
    UPDATE_RING,
    arenas,
    home_nbytes,
    home_tier,
)
from forebay.layout import MASTER, PAGE, STATE_ITEMSIZE, align, gradient_offsets, needs_master, state_layout
from forebay.memory import ALIGNMENT, Tier
from forebay.model import Block, Model
from forebay.plans import Placement, Streaming
from forebay.states import Masters
from tests.null.synthetic import ADAM, ITEMSIZE, block

PARAMETERS = st.tuples(
    st.lists(st.integers(0, 40), max_size=3).map(tuple), st.sampled_from(sorted(ITEMSIZE)), st.booleans()
)
BLOCKS = st.lists(PARAMETERS, min_size=1, max_size=6).map(lambda parameters: block("block", *parameters))
NAMES = st.sampled_from([(), ("momentum_buffer",), ADAM, (*ADAM, "max_exp_avg_sq")])
CHUNKS = st.integers(1, 5000)


@given(BLOCKS, NAMES, CHUNKS)
def test_every_trainable_element_is_in_one_piece(made: Block, names: tuple[str, ...], update_chunk: int) -> None:
    layout = state_layout(made, names, update_chunk, Masters.WHOLE)
    covered: dict[str, list[tuple[int, int]]] = {p.name: [] for p in made.parameters}
    for chunk in layout.chunks:
        for piece in chunk.pieces:
            assert piece.stop > piece.start
            covered[piece.parameter.name].append((piece.start, piece.stop))
    for parameter in made.parameters:
        # In order, without gap or overlap: the pieces of a parameter, one after the other, are the parameter.
        pieces = covered[parameter.name]
        assert [i for start, stop in pieces for i in range(start, stop)] == list(
            range(parameter.numel if parameter.trainable else 0)
        )


@given(BLOCKS, NAMES, CHUNKS)
def test_pieces_share_no_byte_and_stay_inside_their_chunk(
    made: Block, names: tuple[str, ...], update_chunk: int
) -> None:
    layout = state_layout(made, names, update_chunk, Masters.WHOLE)
    end = 0
    for chunk in layout.chunks:
        assert chunk.offset == end and chunk.offset % PAGE == 0 and chunk.nbytes % PAGE == 0
        assert 0 < chunk.elements <= align(update_chunk, ALIGNMENT // STATE_ITEMSIZE)
        needed = chunk.elements * STATE_ITEMSIZE * len(layout.streams)
        assert needed <= chunk.nbytes < needed + PAGE
        reach = 0
        for piece in chunk.pieces:
            assert piece.offset >= reach and piece.offset * STATE_ITEMSIZE % ALIGNMENT == 0
            reach = piece.offset + piece.stop - piece.start
        assert reach <= chunk.elements
        end += chunk.nbytes
    assert layout.nbytes == end
    assert layout.largest_chunk == max((c.nbytes for c in layout.chunks), default=0)


@given(BLOCKS, NAMES)
def test_a_master_is_kept_for_what_is_trained_in_16_bits(made: Block, names: tuple[str, ...]) -> None:
    narrow = any(p.trainable and ITEMSIZE[p.dtype] == 2 for p in made.parameters)
    assert state_layout(made, names, 1024, Masters.WHOLE).streams == ((MASTER, *names) if narrow else names)
    assert any(needs_master(p) for p in made.parameters) is narrow


@given(BLOCKS)
def test_gradients_share_no_byte(made: Block) -> None:
    offsets, nbytes = gradient_offsets(made)
    trained = [p for p in made.parameters if p.trainable]
    assert list(offsets) == [p.name for p in trained]
    end = 0
    for parameter in trained:
        assert offsets[parameter.name] >= end and offsets[parameter.name] % ALIGNMENT == 0
        end = offsets[parameter.name] + parameter.nbytes
    assert end <= nbytes < made.gradient_nbytes + (len(trained) + 1) * ALIGNMENT


def test_chunks_by_hand() -> None:
    """2500 and 100 elements of two fp32 states in chunks of 1024: three chunks, the small parameter in the last."""
    made = block("block", ((50, 50), "float32", True), ((7,), "float32", False), ((100,), "float32", True))
    layout = state_layout(made, ADAM, 1024, Masters.WHOLE)
    assert [[(p.parameter.name, p.start, p.stop, p.offset) for p in c.pieces] for c in layout.chunks] == [
        [("block.0", 0, 1024, 0)],
        [("block.0", 1024, 2048, 0)],
        # 452 elements end at 452; the next parameter starts at the next multiple of 16.
        [("block.0", 2048, 2500, 0), ("block.2", 0, 100, 464)],
    ]
    # The second parameter ends at 564 and is padded to 576; two streams of 4 bytes: 4608 bytes, two pages.
    assert [(c.offset, c.elements, c.nbytes) for c in layout.chunks] == [
        (0, 1024, 2 * PAGE),
        (2 * PAGE, 1024, 2 * PAGE),
        (4 * PAGE, 576, 2 * PAGE),
    ]


HOMES = st.sampled_from(
    [
        (Tier.DEVICE, Tier.DEVICE, Tier.DEVICE),
        *[
            (parameters, Tier.HOST, states)
            for parameters in (Tier.DEVICE, Tier.HOST, Tier.DISK)
            for states in (Tier.HOST, Tier.DISK)
        ],
    ]
)


@st.composite
def planned(draw: st.DrawFn) -> tuple[Model, tuple[Placement, ...], Streaming]:
    count = draw(st.integers(1, 4))
    blocks = tuple(
        block(f"b{i}", *draw(st.lists(PARAMETERS.filter(lambda p: math.prod(p[0]) > 0), min_size=1, max_size=3)))
        for i in range(count)
    )
    placements = tuple(Placement(b.name, *draw(HOMES)) for b in blocks)
    largest = max(home_nbytes(b) for b in blocks)
    slots = tuple([largest] * draw(st.integers(0, 3)))
    chunk, summed = draw(st.integers(1024, 5000)), draw(st.booleans())
    streaming = Streaming(slots=slots, host_slots=(largest,), update_chunk=chunk, checksums=summed)
    return Model(blocks), placements, streaming


@given(planned(), NAMES)
def test_every_byte_has_one_home(plan: tuple[Model, tuple[Placement, ...], Streaming], names: tuple[str, ...]) -> None:
    """Counted over again, tier by tier, block by block."""
    model, placements, streaming = plan
    sizes = arenas(model, placements, streaming, names)
    device, host, disk = sum(streaming.slots), 0, 0
    for placement in placements:
        one = model.block(placement.block)
        states = state_layout(one, names, streaming.update_chunk, Masters.WHOLE).nbytes
        if placement.states is Tier.DEVICE:
            device += one.nbytes + one.gradient_nbytes + states
            continue
        host += gradient_offsets(one)[1]
        host += states if placement.states is Tier.HOST else 0
        disk += states if placement.states is Tier.DISK else 0
        device += one.nbytes if placement.parameters is Tier.DEVICE else 0
        # A dedicated slot holds a copy: the home is on the host.
        host += one.nbytes if placement.parameters is not Tier.DISK else 0
        disk += home_nbytes(one) if placement.parameters is Tier.DISK else 0
    assert (sizes.device, sizes.host - sizes.host_staging, sizes.disk) == (device, host, disk)


@given(planned(), NAMES)
def test_staging_holds_what_passes_through_it(
    plan: tuple[Model, tuple[Placement, ...], Streaming], names: tuple[str, ...]
) -> None:
    model, placements, streaming = plan
    sizes = arenas(model, placements, streaming, names)
    hosted = [(model.block(p.block), p) for p in placements if not p.resident]
    for one, placement in hosted:
        layout = state_layout(one, names, streaming.update_chunk, Masters.WHOLE)
        for parameter in one.parameters:
            assert not parameter.trainable or sizes.gradient_staging >= min(parameter.nbytes, GRADIENT_STAGING)
        if placement.states is Tier.DISK:
            assert sizes.update_ring >= UPDATE_RING * layout.largest_chunk
        for chunk in layout.chunks:
            if any(needs_master(piece.parameter) for piece in chunk.pieces):
                assert sizes.update_workspace >= chunk.elements * STATE_ITEMSIZE
    on_disk = any(home_tier(p) is Tier.DISK for _, p in hosted)
    assert sizes.host_slots == (sum(streaming.host_slots) if on_disk else 0)
    assert sizes.disk_bounce == (DISK_BLOCK * DISK_BOUNCE if sizes.disk else 0)
    summed = (sizes.disk_parameters + sizes.disk_states) // 4096 if streaming.checksums else 0
    assert sizes.disk_sums == 8 * summed


def test_a_plan_by_hand() -> None:
    """Adam, bf16: 2 bytes of parameter and of gradient, 12 bytes of master and moments for an element."""
    made = Model(
        (
            block("embedding", ((1024, 4), "bfloat16", True)),
            block("layer", ((64, 64), "bfloat16", True), ((10,), "bfloat16", False)),
            block("head", ((1024, 4), "bfloat16", True)),
        )
    )
    placements = (
        Placement("embedding", Tier.DEVICE, Tier.DEVICE, Tier.DEVICE),
        Placement("layer", Tier.DISK, Tier.HOST, Tier.DISK),
        Placement("head", Tier.DEVICE, Tier.HOST, Tier.HOST),
    )
    streaming = Streaming(slots=(8256,), host_slots=(12288, 12288), update_chunk=2048)
    sizes = arenas(made, placements, streaming, ADAM)
    assert sizes.device_resident == 4096 * (2 + 12)
    assert sizes.device_gradients == 4096 * 2
    assert sizes.device_slots == 8256 + 4096 * 2  # 8192 bytes, and 20 padded to 64; and the head's own slot
    assert sizes.host_parameters == 4096 * 2  # the home of the head
    assert sizes.host_gradients == 2 * 4096 * 2
    assert sizes.host_states == 4096 * 12
    assert sizes.gradient_staging == 4096 * 2
    assert sizes.update_workspace == 2048 * 4
    assert sizes.update_ring == 3 * 2048 * 12
    assert sizes.host_slots == 2 * 12288
    assert sizes.disk_bounce == DISK_BLOCK
    assert sizes.disk_parameters == 12288  # 8256 in whole pages
    assert sizes.disk_states == 4096 * 12
    everything = tuple(
        replace(p, parameters=Tier.DEVICE, gradients=Tier.DEVICE, states=Tier.DEVICE) for p in placements
    )
    resident = arenas(made, everything, Streaming(), ADAM)
    assert (resident.host, resident.disk) == (0, 0)
