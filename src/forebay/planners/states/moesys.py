"""``moesys``: what is dense stays on the device; blocks with experts come from the host, or from disk by way of it.

Yu, Shen, Hao, Gong, Wu, Bian, Dai and Xiong, "MoESys: a distributed and efficient mixture-of-experts training and
inference system for internet services", 2022 (arXiv 2205.10034, first called SE-MoE; IEEE TSC 2024). Their training has
a hierarchical storage: the dense part of a model is on the device; the parameters and states of experts are on SSD, and
host memory is a cache of those that are used most. What comes next is fetched ahead along two ways at once (2D
prefetch): sparse parameters from SSD to host to device, dense ones from the other devices.

Which blocks have experts is read off the names of parameters, as models name them: a part of the name is ``experts``
(not ``shared_experts``, which every token passes). Ours departs in four things.

- A block is what moves. The experts of a layer come together, with all else that is in their block, routed to or not:
  plans hold for the routing that is worst, and a batch of some hundred tokens asks for each of them. Where the experts
  of a layer are a module, ``blocks=`` of ``forebay.prepare`` makes it a block of its own, and what is dense in the
  layer then stays. Where each expert is a module and a block, the runtime fetches those that run and no others.
- Which experts are used most nobody knows beforehand: the host keeps as many as it has room for, states leave it first
  and parameters then, those of the last blocks first, for the whole run.
- The dense part stays whole where the device has room for it beside two blocks of experts and activations, else its
  parameters, else it streams too.
- Their updates are over before the next forward begins.

Several devices, the other half of the paper, are not planned for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from forebay.memory import Tier
from forebay.model import Block
from forebay.planners.bench import Bench
from forebay.planners.parts import HOSTED, Draft, slot_options, streaming_through
from forebay.planners.problem import Problem
from forebay.planners.shapes import around, usual_window, wide
from forebay.planners.states.drafting import (
    as_much_stays,
    cannot_serve,
    finished,
    levels,
    on_device,
    serial,
    with_homes,
)
from forebay.plans import Plan

__all__ = ["EXPERTS", "moesys", "with_experts"]

EXPERTS: Final = "experts"
"""Part of the name of every parameter of an expert."""

AHEAD: Final = 2
"""Slots for blocks of experts: one computes, one comes."""


def moesys(problem: Problem, bench: Bench | None = None) -> Plan:
    """The dense part on the device as far as there is room, blocks with experts on the host and, as far as need be, on
    disk. Raises ``CannotServe`` for a model without experts, and ``DoesNotFit``."""
    bench = bench or Bench(problem)
    if not any(map(with_experts, bench.model.blocks)):
        why = f"streams the experts of a mixture, and no parameter of this model has {EXPERTS!r} in its name"
        raise cannot_serve("moesys", why, "zero-infinity or auto")
    settled = with_homes(bench, serial(_shape(bench)))
    return finished(bench, "moesys", settled, *_said(bench, settled))


def with_experts(block: Block) -> bool:
    """Whether a parameter of ``block`` is of an expert."""
    return any(EXPERTS in parameter.name.split(".") for parameter in block.parameters)


def _shape(bench: Bench) -> Draft:
    """As much of the dense part on the device as there is room for, and then as many slots. Raises ``DoesNotFit``."""
    dense = [block for block in bench.model.blocks if not with_experts(block)]
    for slots in (AHEAD, 0):
        stays = as_much_stays(bench, dense, slots)
        if stays is not None:
            return _wider(bench, around(bench, dense, stays[0], slots, stays[1]))
    least = around(bench, dense, HOSTED, 0, levels(bench)[-1])
    streams = "streams the experts of a layer at once, beside the activations of a step"
    raise on_device(bench, least, "moesys", streams, disk=True)


def _wider(bench: Bench, least: Draft) -> Draft:
    """``least`` with as many slots as there is room for, up to the usual number, and with a window for gradients."""
    choices = (streaming_through(bench.problem, slots, 0) for slots in slot_options(bench.streamed(least)))
    drafts = (wide(bench, replace(least, streaming=how), usual_window(bench)) for how in choices)
    return next((draft for draft in drafts if bench.fits_device(draft)), least)


def _said(bench: Bench, draft: Draft) -> tuple[str, ...]:
    names = {block.name for block in bench.model.blocks if with_experts(block)}
    sparse = [p for p in draft.placements if p.block in names]
    hot = sum(p.parameters is not Tier.DISK for p in sparse)
    return (f"{len(sparse)} blocks have experts, the parameters of {hot} of them are on the host",)
