"""Forms of models: a container that goes on living, modules that occur several times, parameters in a list."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import ParameterReleased
from tests.parity.small import Layer, Network, batch, prepared, train


def assert_trains_as_plain(make: Callable[[], nn.Module], policy: str) -> None:
    plain = make()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    model, optimizer = prepared(make(), policy)
    assert train(model, optimizer) == expected
    found = model.state_dict()
    assert list(found) == list(plain.state_dict())
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())
    forebay.close(model)


class Boxed(Layer):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        self.box = {"h": super().forward(x)}
        return self.box


class Unboxing(Network):
    """What it changes in the container that a block returned is seen in the one that the block has kept."""

    def __init__(self) -> None:
        super().__init__(Boxed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.emb(x)
        for layer in self.layers:
            made = layer(x)
            made["h"] = made["h"] * 2
            x = layer.box["h"]
        return self.head(x)  # type: ignore[no-any-return]


class Hollow(Network):
    """Has parameters without elements: one of its own, one in a layer, and a layer of no others."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.none = nn.Parameter(torch.zeros(0, 8))
        self.layers[1].none = nn.Parameter(torch.zeros(8, 0))
        self.layers[2] = nn.Linear(8, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.emb(x)
        for layer in (self.layers[0], self.layers[1], self.layers[3]):
            x = layer(x) + self.layers[1].none.sum() + self.layers[2](x).sum()
        return self.head(x) + self.none.sum()  # type: ignore[no-any-return]


def shared_in_a_list() -> nn.Module:
    model = Network(layers=4)
    model.layers[3] = model.layers[1]
    return model


def shared_in_a_sequence() -> nn.Module:
    torch.manual_seed(0)
    again = Layer()
    return nn.Sequential(nn.Linear(8, 8), again, Layer(), again, again)


class Named(nn.Parameter):
    """One of a kind of its own."""


class Scaled(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Named(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = super().forward(x) * self.scale
        return made


def parameters_of_a_kind() -> nn.Module:
    return Network(Scaled)


@pytest.mark.parametrize("policy", ["auto", "stream", "stream-recompute"])
@pytest.mark.parametrize("make", [Unboxing, Hollow, shared_in_a_list, shared_in_a_sequence, parameters_of_a_kind])
def test_forms_of_models(make: Callable[[], nn.Module], policy: str) -> None:
    assert_trains_as_plain(make, policy)


class Listed(Network):
    """Reads, in its own forward, parameters that a list has."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(8) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scales[0]) * self.scales[1]


def test_parameters_of_a_list_ask_for_a_batch() -> None:
    model = Listed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, _ = forebay.prepare(model, optimizer, device_memory="64MiB", device="cpu", policy="stream")
    with pytest.raises(ParameterReleased, match=r"or give prepare\(\) a batch"):
        model(batch(0))
    forebay.close(model)
    assert_trains_as_plain(Listed, "stream")
