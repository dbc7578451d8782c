"""Which parameters move together, and whose forward asks for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import ModelError
from forebay.memory import ALIGNMENT
from forebay.model import Block
from forebay.runtime.blocks import CUTS, BoundModel, find_blocks
from tests.parity.models import CASES, UsedTwice, WithLoss, convnet, llama


def found(model: nn.Module, **options: Any) -> dict[str, Block]:
    return {b.name: b for b in find_blocks(model, **options).model.blocks}


def names_in(block: Block) -> list[str]:
    return [p.name for p in block.parameters]


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_is_in_one_block_and_every_owner_asks_for_it(name: str) -> None:
    model = CASES[name].model(torch.float32)
    bound: BoundModel = find_blocks(model)
    seen = [p.name for b in bound.model.blocks for p in b.parameters]
    assert sorted(seen) == sorted(n for n, _ in model.named_parameters())
    assert len({b.name for b in bound.model.blocks}) == len(bound.model.blocks)
    block_of = {p.name: b for b in bound.model.blocks for p in b.parameters}
    first_name = {id(p): n for n, p in model.named_parameters()}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None:
                assert module_name in block_of[first_name[id(parameter)]].modules, module_name
    for block in bound.model.blocks:
        end = 0
        for parameter in block.parameters:
            live = bound.parameters[parameter.name]
            assert parameter.offset % ALIGNMENT == 0 and parameter.offset >= end
            assert (parameter.shape, parameter.stride) == (tuple(live.shape), live.stride())
            assert parameter.trainable == live.requires_grad and parameter.nbytes == live.nbytes
            end = parameter.offset + parameter.nbytes
        assert end <= block.nbytes < end + ALIGNMENT
    assert bound.model.buffer_nbytes == sum(b.nbytes for b in model.buffers())


REPEATED = {
    "gpt2": [f"transformer.h.{i}" for i in range(3)],
    "llama": [f"model.layers.{i}" for i in range(4)],
    "llama-tied": [f"model.layers.{i}" for i in range(4)],
    "t5": [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(2)],
    "mixtral": [f"model.layers.{i}" for i in range(2)],
    "vit": [f"vit.layers.{i}" for i in range(3)],
    "convnet": [f"body.{i}" for i in range(1, 4)],
    "experts": [f"body.experts.{i}" for i in range(4)],
    "used-twice": [f"body.layers.{i}" for i in range(3)],
    "unused": [f"body.layers.{i}" for i in range(3)],
}


@pytest.mark.parametrize("name", REPEATED)
def test_children_of_repeated_lists_are_blocks(name: str) -> None:
    blocks = found(CASES[name].model(torch.float32))
    for expected in REPEATED[name]:
        assert expected in blocks, list(blocks)
        assert all(p.startswith(f"{expected}.") for p in names_in(blocks[expected]))
        assert blocks[expected].modules[0] == expected and not blocks[expected].held


def test_tied_parameters_belong_to_their_first_owner() -> None:
    blocks = found(llama(tied=True))
    home = blocks["model.embed_tokens"]
    assert home.parameters[0].aliases == ("lm_head.weight",)
    assert {"model.embed_tokens", "lm_head"} <= set(home.modules)
    assert "lm_head" not in blocks


def test_a_module_used_twice_is_one_block() -> None:
    layer = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": layer, "b": nn.Linear(8, 4), "c": layer})
    blocks = found(model)
    weights = [p for b in blocks.values() for p in b.parameters if p.name.endswith("weight")]
    assert sorted(p.name for p in weights) == ["a.weight", "b.weight"]
    owner = next(b for b in blocks.values() if "a.weight" in names_in(b))
    # By the one name that hooks find it by, whatever others it has.
    assert "a" in owner.modules
    assert set(owner.modules) <= {name for name, _ in model.named_modules()}


def test_what_an_enclosing_module_owns_is_held() -> None:
    blocks = found(WithLoss(UsedTwice()))
    scale = next(b for b in blocks.values() if "body.scale" in names_in(b))
    assert scale.held and "body" in scale.modules
    assert not any(b.held for b in blocks.values() if b is not scale)


def test_what_the_root_owns_is_held() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])
            self.table = nn.Parameter(torch.zeros(256, 64))

    blocks = found(Root())
    assert names_in(blocks["(root)"]) == ["table"]
    assert blocks["(root)"].held and blocks["(root)"].modules == ("",)


def test_small_neighbours_are_merged_and_large_ones_are_not() -> None:
    parts = [nn.Linear(2, 2) for _ in range(6)]
    model = nn.ModuleDict({"large": nn.Linear(200, 200), **{f"small{i}": part for i, part in enumerate(parts)}})
    blocks = found(model)
    assert names_in(blocks["large"]) == ["large.weight", "large.bias"]
    small = [b for b in blocks.values() if b.name != "large"]
    assert len(small) == 1 and len(small[0].parameters) == 12
    assert set(small[0].modules) == {f"small{i}" for i in range(6)}
    total = sum(p.nbytes for p in model.parameters())
    assert sum(p.nbytes for p in small[0].parameters) <= total // CUTS


def test_override_by_name() -> None:
    model = llama()
    names = ["model.layers.0.mlp", "model.layers.0.self_attn", "lm_head"]
    blocks = found(model, override=names)
    assert set(names) <= set(blocks)
    assert "model.layers.1" not in blocks
    assert all(p.startswith("model.layers.0.mlp.") for p in names_in(blocks["model.layers.0.mlp"]))


def test_override_through_prepare() -> None:
    """The blocks that the user names are the plan's, and training with them works."""
    model = llama()
    model, optimizer = forebay.prepare(
        model,
        torch.optim.AdamW(model.parameters()),
        device_memory="4MiB",
        policy="stream",
        device="cpu",
        blocks=["model.layers.0.mlp", "model.layers.1.mlp", "lm_head"],
    )
    planned = {p.block for p in forebay.report(model).plan.placements}
    assert {"model.layers.0.mlp", "model.layers.1.mlp", "lm_head"} <= planned
    ids = torch.arange(16).view(1, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert len(forebay.gradients(model)) == len(list(model.parameters()))
    forebay.close(model)


def test_override_that_names_nothing() -> None:
    with pytest.raises(ModelError, match=r"no module called 'model\.layer\.0'; see model\.named_modules\(\)"):
        find_blocks(llama(), ["model.layers.0", "model.layer.0"])


def test_no_parameters() -> None:
    assert find_blocks(nn.Sequential(nn.ReLU(), nn.Flatten())).model.blocks == ()


def test_order_of_memory_is_kept() -> None:
    model = convnet()
    blocks = found(model)
    weight = next(p for p in blocks["body.1"].parameters if p.name == "body.1.0.weight")
    live = model.get_parameter("body.1.0.weight")
    assert weight.stride == live.stride() != torch.empty(live.shape).stride()


@pytest.mark.parametrize(
    ("parameter", "match"),
    [
        (torch.zeros(4, 1).expand(4, 4), "sparse or overlaps itself; make it dense"),
        (torch.zeros(8, 8)[:, ::2], "sparse or overlaps itself; make it dense"),
        (torch.eye(4).to_sparse(), "sparse or overlaps itself; make it dense"),
        (torch.zeros(4, 4, dtype=torch.float64), r"trained in torch\.float64; use float32, bfloat16 or float16"),
    ],
    ids=["expanded", "strided", "sparse", "float64"],
)
def test_parameters_that_cannot_move_are_refused(parameter: torch.Tensor, match: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_parameter("odd", nn.Parameter(parameter))
    with pytest.raises(ModelError, match=f"parameter odd .*{match}"):
        find_blocks(model)


@pytest.mark.parametrize("offset", [0, 8], ids=["the same", "a part"])
def test_two_parameters_of_one_memory_are_refused(offset: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    memory = torch.zeros(32)
    model[0].weight.data, model[2].weight.data = memory[:16].view(4, 4), memory[offset : offset + 16].view(4, 4)
    with pytest.raises(ModelError, match=r"0\.weight and 2\.weight are two and share memory; make them one"):
        find_blocks(model)
    model.requires_grad_(False)
    assert len(find_blocks(model).parameters) == 2, "neither changes"


def test_parameters_may_lie_beside_each_other() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    memory = torch.zeros(32)
    model[0].weight.data, model[2].weight.data = memory[:16].view(4, 4), memory[16:].view(4, 4)
    assert len(find_blocks(model).parameters) == 2


def test_frozen_parameters_may_have_any_dtype() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_parameter("table", nn.Parameter(torch.zeros(4, dtype=torch.float64), requires_grad=False))
    model.register_parameter("codes", nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False))
    specs = {p.name: p for b in find_blocks(model).model.blocks for p in b.parameters}
    assert specs["table"].dtype == "float64" and specs["codes"].dtype == "int8"
    assert not specs["table"].trainable and not specs["codes"].trainable


def test_a_block_without_elements_has_a_place_in_a_slot() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(0), nn.Linear(8, 8))
    assert found(model)["1"].nbytes == ALIGNMENT


def test_modules_of_torchscript_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())))
    for scripted, what in ((model, "module 1"), (torch.jit.trace(nn.Linear(8, 8), torch.ones(1, 8)), "the model")):
        with pytest.raises(ModelError, match=rf"^{what} is TorchScript's .*the model as it was before"):
            find_blocks(scripted)
