"""Which ops are the core of attention, by name and by who reads what."""

from __future__ import annotations

from forebay.planners.activations.literature.graph import Node, OpGraph

MM, BMM, SOFTMAX = "aten.mm.default", "aten.bmm.default", "aten._softmax.default"


def graph(*ops: tuple[str, tuple[int, ...]]) -> OpGraph:
    """Ops by overload and the places of those that they read; products are what multiplies matrices."""
    nodes, runs = [], dict[str, int]()
    for op, reads in ops:
        flops = 10 if op in (MM, BMM) or "scaled_dot_product" in op else 0
        nodes.append(Node((op, runs.get(op, 0)), flops, 1.0, reads, view=False))
        runs[op] = runs.get(op, 0) + 1
    return OpGraph(tuple(nodes))


def test_what_is_between_two_products_of_activations_and_around_a_softmax_is_the_core() -> None:
    written = graph(
        (MM, ()),  # queries
        (MM, ()),  # keys
        (MM, ()),  # values
        (BMM, (0, 1)),
        ("aten.tril.default", ()),  # a mask: made of nothing that a product made
        ("aten.mul.Tensor", (3,)),
        ("aten.add.Tensor", (5, 4)),
        (SOFTMAX, (6,)),
        ("aten.native_dropout.default", (7,)),
        (BMM, (8, 2)),
        (MM, (9,)),
    )
    core = {(BMM, 0), (BMM, 1), ("aten.mul.Tensor", 0), ("aten.add.Tensor", 0), (SOFTMAX, 0)}
    assert written.attention_core == core | {("aten.native_dropout.default", 0)}
    assert not written.fused_attention and written.products == {(MM, n) for n in range(4)} | {(BMM, 0), (BMM, 1)}


def test_a_router_has_a_softmax_and_is_no_attention() -> None:
    router = graph((MM, ()), (SOFTMAX, (0,)), ("aten.topk.default", (1,)), ("aten.mul.Tensor", (2,)), (BMM, (3,)))
    assert not router.attention_core
    assert not graph((BMM, ()), (SOFTMAX, (0,)), (MM, (1,))).attention_core
    assert not graph((SOFTMAX, ()), (BMM, (0,))).attention_core


def test_attention_in_one_op_is_its_core() -> None:
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    fused = graph((MM, ()), (name, (0,)), (MM, (1,)))
    assert fused.attention_core == fused.fused_attention == {(name, 0)}
