"""NLLB-MoE, whose second layers save less with some routes: what the plan names there is left where it is, and no
budget is refused that is larger than one that is not."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from torch import nn

import forebay
from benchmarks.families.tiny import OTHERWISE, Family, families, tiny
from forebay.errors import DoesNotFit
from tests.parity.compare import adamw

(FAMILY,) = (family for family in families("sequence to sequence") if family.name == "nllb-moe")


def model(family: Family) -> nn.Module:
    for otherwise in OTHERWISE:
        try:
            return tiny(family, otherwise)
        except Exception:
            continue
    raise AssertionError("no numbers go together")


def test_more_is_not_refused_where_less_is_not() -> None:
    refused = model(FAMILY)
    with pytest.raises(DoesNotFit) as refusal:
        forebay.prepare(
            refused, adamw(list(refused.parameters())), FAMILY.batch(refused, 0), device_memory=1024, device="cpu"
        )
    assert refusal.value.needed is not None
    for share in (1.0, 1.05, 1.15):
        given = model(FAMILY)
        allowed = int(share * refusal.value.needed)
        prepared, optimizer = forebay.prepare(
            given, adamw(list(given.parameters())), FAMILY.batch(given, 0), device_memory=allowed, device="cpu"
        )
        prepared(**FAMILY.batch(given, 0)).loss.backward()
        optimizer.step()
        forebay.close(prepared)
