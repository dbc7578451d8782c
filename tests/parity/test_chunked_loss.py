"""Language models whose loss is computed in pieces: the numbers of plain PyTorch, and memory for a few pieces."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)
from transformers.loss.loss_utils import ForCausalLMLoss

import forebay
from forebay.errors import DoesNotFit, ModelError
from forebay.loss import ITEMSIZE, TOKENS, VOCABULARY, token_pieces
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.profiler.capture import capture
from forebay.runtime.head import ChunkedHead, recognise
from forebay.trace import Trace
from tests.parity.capture_rig import real_peak
from tests.parity.compare import adamw, assert_same_training
from tests.parity.models import Case, t5
from tests.parity.replay import live_bytes

WORDS = 1031
KiB, MiB = 2**10, 2**20
SIZES: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def batch(step: int) -> dict[str, torch.Tensor]:
    """2 sequences of 40 tokens, the first of them without labels."""
    ids = torch.randint(0, WORDS, (2, 40), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[:, : 3 + step] = -100
    return {"input_ids": ids, "labels": labels}


def counted(step: int) -> dict[str, torch.Tensor]:
    """The same as a trainer calls a model that accumulates gradients."""
    return {**batch(step), "num_items_in_batch": torch.tensor(141)}


def llama(tied: bool = False, **sizes: int) -> Any:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes}, intermediate_size=48, tie_word_embeddings=tied))


def gpt2() -> nn.Module:
    none: Any = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=32, n_layer=2, n_head=2, **none))


def phi() -> Any:
    """Its head has a bias."""
    model = PhiForCausalLM(PhiConfig(**SIZES, intermediate_size=48))
    nn.init.normal_(model.lm_head.bias)
    return model


def gemma2() -> nn.Module:
    """It bends the logits between head and loss."""
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, intermediate_size=48, num_key_value_heads=2, head_dim=16))


MAKES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama-tied": lambda: llama(tied=True),
    "gpt2": gpt2,
    "phi": phi,
}


@pytest.fixture
def closing() -> Iterator[list[nn.Module]]:
    """Models to be closed in the end."""
    models: list[nn.Module] = []
    yield models
    for model in models:
        forebay.close(model)


def prepared(make: Callable[[], nn.Module], closing: list[nn.Module], **how: Any) -> Any:
    torch.manual_seed(0)
    model = make()
    how = {"device_memory": "4MiB", "device": "cpu", "policy": "stream", "loss": "chunked", **how}
    made, _ = forebay.prepare(model, adamw(list(model.parameters())), batch(0), **how)
    closing.append(made)
    return made


@pytest.mark.thinned(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("policy", ["stream", "resident"])
@pytest.mark.parametrize("name", MAKES)
def test_training_is_that_of_plain_pytorch(
    name: str, policy: str, dtype: torch.dtype, closing: list[nn.Module]
) -> None:
    case = Case(MAKES[name], counted if name == "llama" else batch)
    model = assert_same_training(
        case, dtype, steps=2, device_memory="4MiB", device="cpu", policy=policy, loss="chunked"
    )
    closing.append(model)
    plan = forebay.report(model).plan
    assert plan.loss_piece == 64 * KiB
    assert len(token_pieces(80, WORDS, plan.loss_piece)) > 1
    assert not plan.changes_numbers
    assert any("no tokens" in note for note in plan.notes)


def peak(trace: Trace) -> int:
    """The most bytes at a time of what a step makes."""
    return max(nbytes for _, nbytes in live_bytes(trace))


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_the_trace_has_the_bytes_of_the_real_step(name: str) -> None:
    model = MAKES[name]().train()
    piece = TOKENS * WORDS * ITEMSIZE
    trace = capture(model, batch(0), loss_piece=piece).trace
    found = recognise(model)
    assert not isinstance(found, str)
    hooks = ChunkedHead(found, piece)
    measured = real_peak(model, batch(0))
    hooks.remove()
    assert peak(trace) == measured
    # All logits once would be more than that.
    assert peak(capture(model, batch(0)).trace) - measured > 80 * WORDS * ITEMSIZE


def test_auto_takes_pieces_where_nothing_else_fits(closing: list[nn.Module]) -> None:
    """80 x 8,209 logits: 2.6 MB, three times of which is in memory at a time. In pieces of 16 tokens or 64 entries,
    3 x 525 KB; beside them embedding and head, 1.05 MB each, and the gradient of one of them."""

    def large() -> nn.Module:
        return llama(vocab_size=8209)

    budget = 5 * MiB
    with pytest.raises(DoesNotFit):
        prepared(large, closing, device_memory=budget, loss="plain")
    case = Case(large, batch)
    model = assert_same_training(case, torch.float32, steps=2, device_memory=budget, device="cpu", policy="auto")
    closing.append(model)
    report = forebay.report(model)
    assert report.plan.loss_piece == budget // 64
    assert any("pieces" in reason for reason in report.plan.reasons)
    usage = report.usage(Tier.DEVICE)
    assert usage is not None
    assert usage.peak <= report.plan.device <= budget


def test_auto_leaves_alone_what_fits(closing: list[nn.Module]) -> None:
    model = prepared(llama, closing, policy="auto", loss="auto", device_memory="64MiB")
    assert forebay.report(model).plan.loss_piece == 0
    assert model(**batch(0)).logits.shape == (2, 40, WORDS)


def test_evaluation_generation_and_passes_without_labels_have_their_logits(closing: list[nn.Module]) -> None:
    torch.manual_seed(0)
    plain: Any = llama().train()
    model = prepared(llama, closing)
    ids, labels = batch(0)["input_ids"], batch(0)["labels"]
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert model(input_ids=ids, labels=labels).logits.shape == (2, 0, WORDS)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, labels=labels).logits, plain(input_ids=ids, labels=labels).logits)
    model.eval()
    plain.eval()
    expected, made = plain(input_ids=ids, labels=labels), model(input_ids=ids, labels=labels)
    assert torch.equal(made.logits, expected.logits)
    assert torch.equal(made.loss, expected.loss)
    wanted = plain.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), wanted)


def test_logits_that_nobody_computed_are_not_read(closing: list[nn.Module]) -> None:
    """They have a shape, and may be brought elsewhere; a mean of them would be NaN."""
    model = prepared(llama, closing)
    for form in (batch(0), {**batch(0), "return_dict": True}):
        logits = model(**form).logits
        assert logits.shape == logits.detach().cpu().to(torch.bfloat16).shape == (2, 0, WORDS)
        for read in (torch.mean, torch.argmax, lambda made: made[:, :-1], lambda made: made.log_softmax(-1)):
            with pytest.raises(ModelError, match=r"logits of the model are read, .* there are none; use loss='plain'"):
                read(logits)


def agreeing(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the model's loss, and of its logits."""
    made = model(**given)
    loss: torch.Tensor = made.loss + made.logits.square().mean()
    return loss


def test_a_loss_of_logits_has_all_of_them(closing: list[nn.Module]) -> None:
    """Within a budget in which the model's own loss is computed in pieces."""
    torch.manual_seed(0)
    plain: Any = llama().train()
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    expected = []
    for step in range(2):
        loss = agreeing(plain, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    def under(budget: int | str, **more: Any) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model: Any = llama().train()
        made = torch.optim.AdamW(model.parameters(), fused=True)
        return forebay.prepare(model, made, batch(0), device_memory=budget, device="cpu", **more)

    with pytest.raises(ModelError, match="logits of the model are read"):
        under("64MiB", loss_fn=agreeing, loss="chunked")
    with pytest.raises(DoesNotFit) as refused:
        under(4096, loss_fn=agreeing, policy="stream-recompute")
    model, prepared_optimizer = under(refused.value.needed, loss_fn=agreeing, policy="stream-recompute")
    closing.append(model)
    assert forebay.report(model).plan.loss_piece == 0
    for step in range(2):
        loss = agreeing(model, batch(step))
        loss.backward()
        prepared_optimizer.step()
        prepared_optimizer.zero_grad()
        assert loss.item() == expected[step]


def test_close_leaves_the_model_as_it_was() -> None:
    model = prepared(llama, [])
    assert model.loss_function != ForCausalLMLoss
    forebay.close(model)
    assert model.loss_function is ForCausalLMLoss
    assert not model.lm_head._forward_hooks
    assert not model.lm_head._forward_pre_hooks
    assert not model._forward_hooks
    assert model(**batch(0)).logits.shape == (2, 40, WORDS)


def test_a_failed_forward_does_no_harm_to_the_next(closing: list[nn.Module]) -> None:
    model = prepared(llama, closing)
    wrong = {**batch(0), "labels": torch.full((2, 40), WORDS + 5)}
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        model(**wrong)
    with pytest.raises(ModelError, match="78 labels for 80 tokens"):
        model(**batch(0), shift_labels=batch(0)["labels"][:, 1:].contiguous())
    model(**batch(0)).loss.backward()
    assert set(forebay.gradients(model)) == {name for name, _ in model.named_parameters()}


def test_a_plan_from_elsewhere_keeps_its_pieces(closing: list[nn.Module]) -> None:
    plan = Plan.from_json(forebay.report(prepared(llama, closing)).plan.to_json())
    assert plan.loss_piece == 64 * KiB
    model = prepared(llama, closing, plan=replace(plan, loss_piece=VOCABULARY))
    torch.manual_seed(0)
    assert torch.equal(model(**batch(0)).loss, llama().train()(**batch(0)).loss)


# What is left alone.


def test_a_model_that_bends_its_logits_is_left_alone(closing: list[nn.Module]) -> None:
    with pytest.raises(ModelError, match=r"changes its logits between its head and its loss.*loss='plain'"):
        prepared(gemma2, closing)
    case = Case(gemma2, batch)
    model = assert_same_training(case, torch.float32, steps=1, device_memory="4MiB", device="cpu")
    closing.append(model)
    assert forebay.report(model).plan.loss_piece == 0


def _with_own_loss() -> Any:
    model = llama()
    model.loss_function = lambda logits, labels, **kwargs: logits.float().mean()
    return model


def _with_hook() -> Any:
    model = llama()
    model.lm_head.register_forward_hook(lambda module, args, output: None)
    return model


def _with_other_head() -> Any:
    model = llama()
    model.lm_head = nn.Sequential(model.lm_head)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_with_own_loss, "not transformers' standard one"),
        (_with_hook, "has hooks"),
        (_with_other_head, "0 language models with a linear head"),
        (lambda: nn.Linear(4, 4), "0 language models with a linear head"),
        (t5, "the model computes its loss itself"),
    ],
    ids=["own-loss", "hook", "other-head", "no-model", "no-loss-function"],
)
def test_what_is_not_recognised_is_refused_with_the_reason(
    make: Callable[[], nn.Module], words: str, closing: list[nn.Module]
) -> None:
    with pytest.raises(ModelError, match=words):
        prepared(make, closing)


class Derived(LlamaForCausalLM):
    """Has a forward that asks the one it inherits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)

    forward.__signature__ = inspect.signature(LlamaForCausalLM.forward)  # type: ignore[attr-defined]


def test_a_forward_that_asks_another_is_recognised() -> None:
    found = recognise(Derived(llama().config))
    assert not isinstance(found, str), found


class Around(nn.Module):
    """Calls a language model for its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = llama()

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> Any:
        return {"loss": self.net(input_ids=words, labels=targets).loss}


class Judging(Around):
    """Reads its logits, too."""

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> Any:
        made = self.net(input_ids=words, labels=targets)
        return {"loss": made.loss + made.logits.detach().square().mean()}


class Losing(Around):
    """Makes the loss itself."""

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> Any:
        logits = self.net(input_ids=words).logits
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())}


def around(step: int) -> dict[str, torch.Tensor]:
    return dict(zip(("words", "targets"), batch(step).values(), strict=True))


@pytest.mark.parametrize(("make", "piece"), [(Around, 32 * KiB), (Judging, 0)])
def test_a_language_model_inside_of_another(
    make: Callable[[], nn.Module], piece: int, closing: list[nn.Module]
) -> None:
    """``auto`` takes pieces where the plan gains by that and nobody else reads the logits."""
    case = Case(make, around)
    model = assert_same_training(case, torch.float32, steps=1, device_memory="2MiB", device="cpu", policy="auto")
    closing.append(model)
    assert forebay.report(model).plan.loss_piece == piece


@pytest.mark.parametrize(
    ("make", "words"), [(Judging, "the logits of the model are read"), (Losing, "the model computed none")]
)
def test_what_a_model_inside_of_another_is_called_for_shows_when_it_is_recorded(
    make: Callable[[], nn.Module], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        capture(make(), around(0), loss_piece=32 * KiB)


def test_a_batch_without_labels_is_refused(closing: list[nn.Module]) -> None:
    model = llama()
    with pytest.raises(ModelError, match="brings no labels"):
        forebay.prepare(
            model, adamw(list(model.parameters())), {"input_ids": batch(0)["input_ids"]}, device_memory="4MiB",
            device="cpu", loss="chunked"
        )  # fmt: skip


def test_autocast_keeps_its_own_loss(closing: list[nn.Module]) -> None:
    model = prepared(llama, closing, device_memory="64MiB")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(**batch(0)).logits.shape == (2, 40, WORDS)


def test_a_second_derivative_is_refused(closing: list[nn.Module]) -> None:
    model = prepared(llama, closing, policy="resident")
    with pytest.raises(ModelError, match="no second derivative"):
        model(**batch(0)).loss.backward(create_graph=True)
