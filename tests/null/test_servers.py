"""Servers of several devices: how they are written, and which stage is on which device. No torch."""

from __future__ import annotations

import pytest

from forebay.errors import ConfigError
from forebay.planners.parallel.mapping import crossed, in_order
from forebay.servers import DeviceShare, Server, ServerPlan
from forebay.timeline import Lane

CHANNEL = 1e10


@pytest.mark.parametrize(
    ("text", "roots", "peer"),
    [
        ("1", (0,), None),
        ("4", (0, 0, 0, 0), None),
        ("2+2", (0, 0, 1, 1), None),
        ("1+3:25GB", (0, 1, 1, 1), 25e9),
        ("2:50GB/s", (0, 0), 50e9),
        ("2:1GiB", (0, 0), 2.0**30),
    ],
)
def test_devices_are_written_by_root_complex_with_the_rate_between_them(
    text: str, roots: tuple[int, ...], peer: float | None
) -> None:
    server = Server.parse(text, CHANNEL)
    assert server == Server(roots, CHANNEL, peer) and server.devices == len(roots)
    assert server.groups == text.partition(":")[0] and server.groups in server.words
    assert server.sharers == max(map(roots.count, roots))


@pytest.mark.parametrize("text", ["", "0", "2+0", "-1", "four", "2+", "+2", "65", "2:", "2:fast", "2:0", "2 2"])
def test_what_is_no_server(text: str) -> None:
    with pytest.raises(ConfigError, match=r"devices are written N or N\+N|1 to 64 devices|more than 0 bytes/s"):
        Server.parse(text, CHANNEL)


def test_links_of_nothing() -> None:
    with pytest.raises(ConfigError, match="a device or more"):
        Server((), 1.0)
    with pytest.raises(ConfigError, match="more than 0 bytes/s"):
        Server((0,), 0.0)
    with pytest.raises(ConfigError, match="links between devices"):
        Server((0,), 1.0, 0.0)


def test_crossed_neighbours_are_on_different_root_complexes() -> None:
    assert in_order(Server((0, 0, 1, 1), 1.0), 5) == (0, 1, 2, 3, 0)
    assert crossed(Server((0, 0, 1, 1), 1.0), 5) == (0, 2, 1, 3, 0)
    assert crossed(Server((0, 0, 0, 1), 1.0), 4) == (0, 3, 1, 2)
    assert crossed(Server((0,), 1.0), 2) == (0, 0)


def test_a_plan_says_who_is_fullest_and_how_long_devices_idle() -> None:
    plan = ServerPlan("dapple", 4.0, (DeviceShare(2, 3.0, 10), DeviceShare(2, 1.0, 20)), 0, {Lane.H2D: 5})
    assert plan.peak == 20 and plan.idle_share == pytest.approx(0.5)
