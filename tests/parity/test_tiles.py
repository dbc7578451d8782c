"""Weights in tiles: the numbers of plain PyTorch, and the memory of a panel and a tile or two."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import forebay
from forebay.device.ledger import StorageLedger
from forebay.errors import ModelError
from forebay.memory import Ledger, Tier
from forebay.runtime.grids import GRAIN, Grid, grid_of
from forebay.runtime.tiled_loss import picked_from_tiles
from forebay.runtime.tiles import TiledEmbedding, TiledLinear, is_exact
from forebay.timeline import Lane
from forebay.units import parse_bytes
from tests.parity.compare import adamw, assert_same_training
from tests.parity.models import Case
from tests.parity.tiling import TOKENS, WIDTH, WORDS, Bigram, bigram_batch, language_batch, language_model

BOTH = (torch.float32, torch.bfloat16)
CASES = {
    "bigram": (Case(Bigram, bigram_batch), {torch.float32: "512KiB", torch.bfloat16: "256KiB"}),
    "bias": (Case(lambda: Bigram(bias=True), bigram_batch), {torch.float32: "512KiB", torch.bfloat16: "256KiB"}),
    "llama": (Case(language_model, language_batch), {torch.float32: "260KiB", torch.bfloat16: "130KiB"}),
    "llama-tied": (
        Case(lambda: language_model(tied=True), language_batch),
        {torch.float32: "260KiB", torch.bfloat16: "130KiB"},
    ),
    # Also what is inside of layers: the projections of the MLP.
    "inside": (
        Case(lambda: language_model(vocab_size=256), lambda step: language_batch(step, 256)),
        {torch.float32: "66KiB", torch.bfloat16: "33KiB"},
    ),
}


WAYS = [
    ("bigram", torch.float32),
    ("bigram", torch.bfloat16),
    ("bias", torch.bfloat16),
    ("llama", torch.float32),
    ("llama-tied", torch.bfloat16),
    ("inside", torch.float32),
]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("name", "dtype"), WAYS, ids=[f"{name}-{str(dtype)[6:]}" for name, dtype in WAYS])
def test_same_numbers(name: str, dtype: torch.dtype) -> None:
    case, sizes = CASES[name]
    model = assert_same_training(
        case, dtype, tile=sizes[dtype], clip=None, steps=2, policy="stream", device_memory="64MiB", device="cpu"
    )
    plan = forebay.report(model).plan
    forebay.close(model)
    assert not plan.changes_numbers
    assert any("its gradient is one sum" in note for note in plan.notes) == (name == "llama-tied")


def test_same_numbers_from_disk(tmp_path: Path) -> None:
    given: dict[str, Any] = {"device_memory": "64MiB", "host_memory": "14MiB", "disk": f"{tmp_path}:96MiB"}
    case, sizes = CASES["bigram"]
    model = assert_same_training(
        case, torch.float32, tile=sizes[torch.float32], clip=None, steps=2, policy="stream", **given
    )
    usage = {t.tier: t for t in forebay.report(model).timeline.tiers}
    forebay.close(model)
    assert usage[Tier.DISK].peak > 0


WEIGHT, PARTS = 4 * WORDS * WIDTH, 4
"""Bytes of the largest parameter, and into how many it is cut either way."""


def test_a_device_smaller_than_the_largest_parameter() -> None:
    """Of a weight of w bytes cut into k by k there are a panel of w / k and slots of w / k^2, or w / 2k for an
    embedding; as much is a gradient, of which one is made and one on its way; beside them a few times the logits."""
    allowed: dict[str, Any] = {"device_memory": "1400KiB", "device": "cpu"}
    assert parse_bytes(allowed["device_memory"]) < WEIGHT == 2 * 2**20
    model = Bigram()
    with pytest.raises(forebay.ForebayError, match=r"forebay\.tile\(model, '512KiB'\) .*, which cuts embed\.weight"):
        forebay.prepare(model, adamw(list(model.parameters())), bigram_batch(0), **allowed)
    assert forebay.tile(model, WEIGHT // PARTS) == ("embed", "head")
    model, optimizer = forebay.prepare(model, adamw(list(model.parameters())), bigram_batch(0), **allowed)
    for step in range(2):
        model(**bigram_batch(step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    report = forebay.report(model)
    forebay.close(model)
    device = report.timeline.usage(Tier.DEVICE)
    tile, panel, logits = WEIGHT // PARTS**2, WEIGHT // PARTS, 4 * TOKENS * WORDS
    slots = report.plan.streaming.slots
    assert set(slots) <= {tile, panel // 2}  # of the head, and of the embedding
    assert panel + tile <= device.peak <= sum(slots) + panel + 2 * (panel // 2) + 5 * logits
    assert device.peak <= report.plan.device <= report.plan.budget.device < WEIGHT


def test_every_tile_crosses_the_link_as_often_as_the_weight_would() -> None:
    """Forward and backward of the head, forward of the embedding; gradients once. The streamed model as it is moves as
    much in the same plan."""
    moved = []
    for most in (None, WEIGHT // PARTS):
        model = Bigram()
        if most is not None:
            forebay.tile(model, most)
        # One slot's room: what is fetched for forward is not there any more when backward asks for it.
        model, optimizer = forebay.prepare(
            model,
            adamw(list(model.parameters())),
            bigram_batch(0),
            device_memory="32MiB",
            policy="stream",
            device="cpu",
        )
        for step in range(3):
            model(**bigram_batch(step))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        forebay.synchronize(model)
        moved.append(forebay.report(model).timeline.moved())
        forebay.close(model)
    assert moved[1][Lane.D2H] == moved[0][Lane.D2H] == 3 * 2 * WEIGHT
    assert moved[1][Lane.H2D] <= 3 * 3 * WEIGHT + WEIGHT  # and what the last step fetches for the next one


def test_memory_of_a_loss_in_pieces_is_a_panel_its_gradient_and_some_pieces() -> None:
    """Forward: logits and their log-softmax, or a panel and logits. Backward: of a row of tiles the panel and its
    gradient; beside them a log-softmax, the gradient that arrives at it and the one that leaves."""
    grid = grid_of("weight", (WORDS, WIDTH), 4, WEIGHT // PARTS, by_rows=False)
    _, layer = alike(False, torch.float32, grid)
    tokens, panel = 160, WEIGHT // PARTS
    hidden, index = torch.randn(tokens, WIDTH, requires_grad=True), torch.arange(tokens)[:, None]
    piece, small = 16 * WORDS * 4, 6 * 4 * tokens + 64 * tokens
    for part in layer.parts():
        part.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))
    ledger = Ledger(Tier.DEVICE, 2**40)
    watch = StorageLedger(ledger)
    for leaf in (hidden, index, *layer.parts()):
        watch.adopt(leaf.untyped_storage())
    watch.install()
    watch.activate(True)
    try:
        made = picked_from_tiles(layer, hidden, index, piece)
        assert panel < ledger.usage().peak <= panel + piece + small
        made.sum().backward()
        peak = ledger.usage().peak
    finally:
        watch.uninstall()
    assert 2 * panel < peak <= 2 * panel + 3 * piece + hidden.nbytes + small < WEIGHT
    whole = F.linear(hidden.detach(), grid.joined(layer.parts()))
    assert torch.equal(made, torch.log_softmax(whole, 1).gather(1, index))


def alike(bias: bool, dtype: torch.dtype, grid: Grid) -> tuple[nn.Linear, TiledLinear]:
    torch.manual_seed(1)
    plain = nn.Linear(grid.shape[1], grid.shape[0], bias=bias).to(dtype)
    parts = [nn.Parameter(grid.cut(plain.weight.detach(), n).clone()) for n in range(len(grid.tiles))]
    offset = None if plain.bias is None else nn.Parameter(plain.bias.detach().clone())
    return plain, TiledLinear(grid, parts, offset)


GRID = grid_of("weight", (390, 200), 4, 120 * 1024, by_rows=False)


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "as it is"])
def test_a_linear_layer(dtype: torch.dtype, bias: bool, autocast: bool) -> None:
    assert len(GRID.rows) == len(GRID.columns) == 3
    plain, tiled = alike(bias, dtype, GRID)
    left, right = (torch.randn(3, 17, 200, generator=torch.Generator().manual_seed(2)).to(dtype) for _ in range(2))
    with torch.autocast("cpu", enabled=autocast):
        expected, made = plain(left.requires_grad_()), tiled(right.requires_grad_())
        with torch.no_grad():
            assert torch.equal(tiled(right), expected)
    assert made.dtype == expected.dtype and torch.equal(made, expected)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)).to(expected.dtype)
    expected.backward(upstream)
    made.backward(upstream)
    assert torch.equal(left.grad, right.grad)
    assert torch.equal(GRID.joined(part.grad for part in tiled.parts()), plain.weight.grad)
    assert plain.bias is None or torch.equal(tiled.bias.grad, plain.bias.grad)


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_a_bias_is_added_where_torch_adds_it(dtype: torch.dtype) -> None:
    """Within the product, rounded once, or after it; for inputs of two dimensions to four, in order or not."""
    plain, tiled = alike(True, dtype, GRID)
    hidden = torch.randn(4, 6, 20, 200, generator=torch.Generator().manual_seed(2)).to(dtype)
    for given in (hidden, hidden[0], hidden[0, 0], hidden[0].transpose(0, 1), hidden.transpose(1, 2)):
        left, right = (given.detach().requires_grad_() for _ in range(2))
        expected, made = plain(left), tiled(right)
        upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        of_rows, of_bias = torch.autograd.grad(made, [right, tiled.bias], upstream)
        rows_expected, bias_expected = torch.autograd.grad(expected, [left, plain.bias], upstream)
        assert torch.equal(made, expected) and torch.equal(of_bias, bias_expected)
        # Whether some columns of a product have the bits of the whole is the processor's to say (AMX: not in bf16).
        tokens = given.numel() // given.shape[-1]
        exact = is_exact(GRID, tokens, dtype, torch.device("cpu"), bias=True)
        assert torch.equal(of_rows, rows_expected) or not exact


def test_another_dtype_is_refused_as_in_plain_pytorch() -> None:
    for layer in alike(False, torch.bfloat16, GRID):
        with pytest.raises(RuntimeError, match="dtype"):
            layer(torch.zeros(2, 200))


@pytest.mark.parametrize("padding", [None, 5, 389])
def test_an_embedding(padding: int | None) -> None:
    plain = nn.Embedding(390, 200, padding_idx=padding)
    for by_rows in (True, False):
        grid = grid_of("weight", (390, 200), 4, 120 * 1024, by_rows=by_rows)
        parts = [nn.Parameter(grid.cut(plain.weight.detach(), n).clone()) for n in range(len(grid.tiles))]
        tiled = TiledEmbedding(grid, parts, padding)
        ids = torch.randint(0, 390, (4, 40), generator=torch.Generator().manual_seed(4))
        ids[0, :3] = 5
        expected, made = plain(ids), tiled(ids)
        assert torch.equal(made, expected)
        upstream = torch.randn(expected.shape)
        plain.weight.grad = None
        expected.backward(upstream)
        made.backward(upstream)
        assert torch.equal(grid.joined(part.grad for part in parts), plain.weight.grad)
        for odd in (-1, 390):
            with pytest.raises(IndexError):
                tiled(torch.tensor([0, odd]))


def test_frozen_tiles_have_no_gradient() -> None:
    _, tiled = alike(True, torch.float32, GRID)
    tiled.requires_grad_(False)
    hidden = torch.randn(2, 200, requires_grad=True)
    tiled(hidden).sum().backward()
    assert hidden.grad is not None and all(part.grad is None for part in tiled.parts())


def test_there_is_no_second_derivative() -> None:
    _, tiled = alike(False, torch.float32, GRID)
    hidden = torch.randn(2, 200, requires_grad=True)
    with pytest.raises(ModelError, match="no second derivative"):
        torch.autograd.grad(tiled(hidden).sum(), hidden, create_graph=True)


def test_a_try_says_what_is_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_exact(GRID, 16, torch.float32, torch.device("cpu"), bias=True)
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *given: linear(*given) * (1 + 2**-20))
    assert not is_exact(GRID, 16, torch.float32, torch.device("cpu"), bias=True)


def test_a_plan_says_that_numbers_may_be_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.tiling.is_exact", lambda *given, **named: False)
    model = Bigram()
    forebay.tile(model, "512KiB")
    model, _ = forebay.prepare(
        model, adamw(list(model.parameters())), bigram_batch(0), device_memory="64MiB", device="cpu"
    )
    said = forebay.report(model).plan
    forebay.close(model)
    assert len(said.changes_numbers) == 1 and said.changes_numbers[0].startswith("head is computed in tiles")
    # So does one that is given, once, and one of a model that shares the device.
    silent = replace(said, changes_numbers=(), reasons=(), notes=())
    for given in (silent, said):
        again, _ = forebay.prepare(
            model, adamw(list(model.parameters())), bigram_batch(0), device_memory="64MiB", device="cpu", plan=given
        )
        assert forebay.report(again).plan.changes_numbers == said.changes_numbers
        forebay.close(again)
    asked = [(one, adamw(list(one.parameters())), bigram_batch(0)) for one in (model, Bigram())]
    (beside, _), (other, _) = forebay.prepare_several(asked, device_memory="64MiB", device="cpu")
    assert forebay.report(beside).plan.changes_numbers == said.changes_numbers
    assert forebay.report(other).plan.changes_numbers == ()
    forebay.close(beside)
    forebay.close(other)


def test_a_copy_of_a_tiled_layer_is_a_layer_of_its_own() -> None:
    model = Bigram()
    forebay.tile(model, "512KiB")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for part in other.head.parts():
            part.zero_()
    assert not other.state_dict()["head.weight"].any() and model.state_dict()["head.weight"].all()


@pytest.mark.parametrize(
    ("shape", "most"), [((4096, 256), 2**20), ((1031, 128), 300 * 2**10), ((130, 4000), 1100 * 2**10)]
)
def test_a_grid_covers_a_weight_once(shape: tuple[int, int], most: int) -> None:
    grid = grid_of("weight", shape, 4, most, by_rows=False)
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    assert torch.equal(grid.joined(grid.cut(whole, n) for n in range(len(grid.tiles))), whole)
    assert sum(grid.cut(whole, n).numel() for n in range(len(grid.tiles))) == whole.numel()
    assert grid.panel * 4 <= most
    assert all(end - first >= GRAIN for spans in (grid.rows, grid.columns) for first, end in spans)
