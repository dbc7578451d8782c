"""Plans in which blocks that are at home on the host or on disk are updated on the device."""

from __future__ import annotations

from dataclasses import replace

import torch

from forebay.arenas import Sizer, arenas
from forebay.cells import cell_of
from forebay.layout import state_layout
from forebay.plans import Plan, Update
from forebay.runtime.blocks import find_blocks
from tests.null.updating import updating
from tests.parity.models import Case
from tests.parity.speculating import speculating, trained
from tests.parity.test_delays import STATES

__all__ = ["chunk_jobs", "on_device", "placed"]


def placed(case: Case, dtype: torch.dtype, plan: Plan, *, cells: int, states: tuple[str, ...] = STATES) -> Plan:
    """``plan`` with a window of ``cells`` chunks, and the bytes that it comes to."""
    model = find_blocks(case.model(dtype)).model
    sizer = Sizer(model, states, plan.streaming.update_chunk, plan.streaming.masters)
    window = sizer.update_window(plan.updated(Update.DEVICE), cells)
    streaming = replace(plan.streaming, update_window=window)
    sizes = arenas(model, plan.placements, streaming, states)
    return replace(plan, streaming=streaming, host=sizes.host, disk=sizes.disk)


def on_device(
    case: Case,
    dtype: torch.dtype,
    *,
    disk: bool,
    cells: int = 2,
    host_slots: int = 2,
    speculate: int = 0,
    states: tuple[str, ...] = STATES,
) -> Plan:
    """Every block that trains is updated on the device, but the last ``speculate`` of them, which are updated on the
    host ahead of their step. At home on the host or, with ``disk``, in turn wherever a block can be."""
    plan = speculating(case, dtype, disk=disk, host_slots=host_slots, states=states)
    names = trained(find_blocks(case.model(dtype)).model)
    there, ahead = names[: len(names) - speculate], names[len(names) - speculate :]
    streaming = replace(plan.streaming, update_window=1)
    plan = updating(updating(plan, Update.AHEAD, ahead), Update.DEVICE, there, streaming=streaming)
    return placed(case, dtype, plan, cells=cells, states=states)


def chunk_jobs(case: Case, dtype: torch.dtype, plan: Plan) -> list[int]:
    """Bytes of the cell of every chunk that a step updates on the device."""
    model = find_blocks(case.model(dtype)).model
    blocks = map(model.block, plan.updated(Update.DEVICE))
    cut = STATES, plan.streaming.update_chunk, plan.streaming.masters
    layouts = [state_layout(block, *cut) for block in blocks]
    return [cell_of(chunk).nbytes for layout in layouts for chunk in layout.chunks]
