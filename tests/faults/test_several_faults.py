"""Several models in turns, and what goes wrong in one of them or in the call."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import forebay
from forebay.device.turn import Cancelled
from forebay.errors import ConfigError, DoesNotFit, ModelError, OptimizerError, SessionClosed, UsageError
from tests.parity.compare import adamw, assert_same_steps
from tests.parity.models import CASES
from tests.parity.recomputing import AMPLE
from tests.parity.test_several_train import DTYPE, QUICK, least, prepared

Pairs = list[tuple[nn.Module, torch.optim.Optimizer]]


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    made = prepared(*QUICK, policy="stream")
    yield made
    for model, _ in made:
        forebay.close(model)
    assert not _get_current_dispatch_mode_stack(), "in whatever thread each was closed"
    assert not [t for t in threading.enumerate() if t.name.startswith("forebay")]


def trained(pairs: Pairs, number: int, steps: int = 2) -> Callable[[], None]:
    return partial(assert_same_steps, *pairs[number], QUICK[number], DTYPE, steps=steps)


def test_an_error_in_one_leaves_the_others_as_they_are(pairs: Pairs) -> None:
    """The others go on to their ends, then it is raised; and the one that has failed can be trained on."""
    ended = []

    def fails() -> None:
        loss = pairs[0][0](**QUICK[0].inputs(0, DTYPE))["loss"]
        loss.register_hook(lambda _: 1 / 0)
        loss.backward()

    def other() -> None:
        trained(pairs, 1)()
        ended.append(True)

    models = [model for model, _ in pairs]
    with pytest.raises(ZeroDivisionError) as found:
        forebay.alternate(models, [fails, other])
    assert ended and "raised by the loop of model 0" in found.value.__notes__
    pairs[0][1].zero_grad()
    forebay.alternate(models, [trained(pairs, 0), trained(pairs, 1)])


def test_all_that_fail_are_named(pairs: Pairs) -> None:
    def fails(words: str) -> None:
        raise ValueError(words)

    with pytest.raises(ValueError, match="one") as found:
        forebay.alternate([m for m, _ in pairs], [partial(fails, "one"), partial(fails, "other")])
    assert "the loop of model 1 failed too: ValueError: other" in found.value.__notes__


def test_ctrl_c_ends_all_of_them(pairs: Pairs) -> None:
    """In the middle of steps; afterwards they can be trained on."""
    ends: list[type[BaseException]] = []
    main = threading.main_thread()
    assert main.ident is not None

    def endless(number: int) -> None:
        model, made = pairs[number]
        try:
            while True:
                model(**QUICK[number].inputs(0, DTYPE))["loss"].backward()
                made.step()
                made.zero_grad()
                if number == 0:
                    signal.pthread_kill(main.ident, signal.SIGINT)
        except BaseException as error:
            ends.append(type(error))
            raise

    with pytest.raises(KeyboardInterrupt):
        forebay.alternate([m for m, _ in pairs], [partial(endless, n) for n in (0, 1)])
    assert ends == [Cancelled, Cancelled]
    for _, made in pairs:
        made.zero_grad()
    forebay.alternate([m for m, _ in pairs], [trained(pairs, 0), trained(pairs, 1)])


def test_one_that_closes_its_model_ends_by_itself(pairs: Pairs) -> None:
    def closes() -> None:
        forebay.close(pairs[0][0])
        pairs[0][0](**QUICK[0].inputs(0, DTYPE))  # plain PyTorch again

    forebay.alternate([m for m, _ in pairs], [closes, trained(pairs, 1)])
    with pytest.raises(UsageError, match="not prepared"):
        forebay.alternate([m for m, _ in pairs], [closes, closes])


# Calls that cannot be.


def test_calls_that_make_no_sense(pairs: Pairs) -> None:
    (first, _), (second, _) = pairs
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    with pytest.raises(UsageError, match="got 2 models and 1 loops"):
        forebay.alternate([first, second], [nothing])
    with pytest.raises(UsageError, match="got 0 models"):
        forebay.alternate([], [])
    with pytest.raises(UsageError, match="named twice"):
        forebay.alternate([first, first], [nothing, nothing])
    with pytest.raises(UsageError, match="not prepared"):
        forebay.alternate([nn.Linear(2, 2)], [nothing])
    with pytest.raises(UsageError, match="take turns already"):
        forebay.alternate([first], [lambda: forebay.alternate([second], [nothing])])


def test_a_loop_that_uses_the_model_of_another_is_refused(pairs: Pairs) -> None:
    (first, _), (second, others) = pairs
    batch, words = QUICK[1].inputs(0, DTYPE), r"the loop of model 0 uses model 1, .* in the order of their models"

    def taught() -> None:
        with torch.no_grad():
            second(**batch)
        trained(pairs, 0)()

    for loop in (trained(pairs, 1), taught, others.step):
        with pytest.raises(UsageError, match=words):
            forebay.alternate([first, second], [loop, lambda: None])
    with pytest.raises(UsageError, match=words) as failed:
        forebay.alternate([first, second], [trained(pairs, 1), trained(pairs, 0)])
    assert "the loop of model 1 uses model 0" in "".join(failed.value.__notes__)
    forebay.alternate([first, second], [trained(pairs, 0), trained(pairs, 1)])


def test_models_of_two_calls_do_not_take_turns(pairs: Pairs) -> None:
    others = prepared(*QUICK, policy="stream")
    mixed = [pairs[0][0], others[1][0]]
    for asked in (lambda: forebay.alternate(mixed, [lambda: None] * 2), lambda: forebay.report_several(mixed)):
        with pytest.raises(UsageError, match="were not prepared together"):
            asked()
    for model, _ in others:
        forebay.close(model)
    model = QUICK[0].model(DTYPE)
    forebay.prepare(model, adamw(list(model.parameters())), device_memory=AMPLE, device="cpu")
    with pytest.raises(UsageError, match=r"forebay\.report"):
        forebay.report_several([model])
    with pytest.raises(UsageError, match="not prepared together"):
        forebay.report_several([])
    forebay.close(model)


def given(case: str = "used-twice") -> tuple[nn.Module, torch.optim.Optimizer, object]:
    model = CASES[case].model(DTYPE)
    return model, adamw(list(model.parameters())), CASES[case].inputs(0, DTYPE)


def several(*models: tuple[nn.Module, torch.optim.Optimizer, object], **asked: object) -> None:
    forebay.prepare_several(models, **{"device": "cpu", "device_memory": AMPLE, "policy": "zero-infinity", **asked})  # type: ignore[arg-type]


def test_what_cannot_be_prepared_says_which_and_changes_nothing() -> None:
    good = given()
    before = {name: value.clone() for name, value in good[0].state_dict().items()}
    model, optimizer, batch = given()
    with pytest.raises(UsageError, match="model 1: each is given as a model, its optimizer and a batch, got 2 things"):
        several(good, (model, optimizer))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"model 1: .* and a batch, got Sequential"):
        several(good, nn.Sequential())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"model 1: prepare takes a torch\.nn\.Module, and then its"):
        several(good, (optimizer, model, batch))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="model 1: it has no batch"):
        several(good, (model, optimizer, None))
    with pytest.raises(OptimizerError, match=r"model 1: .*hold"):
        several(good, (model, good[1], batch))
    with pytest.raises(ModelError, match="models 0 and 1 share parameter"):
        several(good, good)
    with pytest.raises(ConfigError, match="two models or more, got 1"):
        several(good)
    with pytest.raises(ModelError, match="model 1: "):
        several(good, (model, optimizer, {"labels": torch.zeros(1)}))
    with pytest.raises(ModelError, match="cuda"):
        several(good, given("unused"), device="cuda")
    forebay.prepare(model, optimizer, batch, device_memory=AMPLE, device="cpu")
    with pytest.raises(ModelError, match="model 1: it, or a part of it, is prepared"):
        several(good, (model, optimizer, batch))
    forebay.close(model)
    assert all(torch.equal(value, before[name]) for name, value in good[0].state_dict().items())


def test_a_budget_without_room_is_refused_before_anything_is_loaded() -> None:
    one, other = given(), given("unused")
    needed = [least(CASES[name]) for name in ("used-twice", "unused")]
    with pytest.raises(DoesNotFit, match=r"the models need .* together") as found:
        several(one, other, device_memory=sum(needed) - 1)
    assert found.value.needed == sum(needed)
    with pytest.raises(DoesNotFit, match=r"^model [01]: device memory"):
        several(one, other, device_memory=max(needed) - 1)
    with pytest.raises(DoesNotFit, match="host"):
        several(one, other, host_memory="64KiB")
    assert not [t for t in threading.enumerate() if t.name.startswith("forebay")]


def test_a_second_model_that_cannot_be_opened_puts_the_first_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay import several as room

    opened, real = [], room.open_session

    def second_fails(*args: object, **more: object) -> object:
        if opened:
            raise SessionClosed("as if the disk had failed")
        opened.append(True)
        return real(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(room, "open_session", second_fails)
    one, other = given(), given("unused")
    before = {name: value.clone() for name, value in one[0].state_dict().items()}
    with pytest.raises(SessionClosed, match="as if"):
        several(one, other, policy="stream")
    assert all(torch.equal(value, before[name]) for name, value in one[0].state_dict().items())
    assert not [t for t in threading.enumerate() if t.name.startswith("forebay")]
    one[0](**CASES["used-twice"].inputs(0, DTYPE))
