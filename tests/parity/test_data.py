"""Text files to batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forebay.data.text import Windows, read_text, tokenize
from forebay.data.tokenizers import ByteTokenizer, FolderTokenizer, find_tokenizer
from forebay.errors import ModelError, UsageError


def test_bytes_are_tokens_and_a_zero_ends_each_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab", encoding="utf-8")
    (tmp_path / "b.txt").write_text("\u00e9", encoding="utf-8-sig")  # the mark at the start is not text
    tokens = tokenize([tmp_path / "a.txt", tmp_path / "b.txt"], ByteTokenizer())
    assert tokens.tolist() == [97, 98, 0, 0xC3, 0xA9, 0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no data file"),
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"ab\xff\xfe", "not UTF-8 text (byte 2)"),
        (b"ab\0cd", "is binary"),
    ],
)
def test_a_file_that_is_no_text_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        read_text(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        read_text(tmp_path)


def windows(count: int, **changes: int) -> Windows:
    return Windows(torch.arange(count, dtype=torch.int32), **({"batch": 2, "seq": 4, "seed": 1} | changes))


def test_each_epoch_deals_every_window_once_in_an_order_of_its_own() -> None:
    deck = windows(35)  # 8 windows of 4 and 3 tokens over
    assert (deck.per_epoch, deck.tokens) == (4, 32)
    epochs = []
    for epoch in range(2):
        rows = torch.cat([deck.batch(4 * epoch + i)["input_ids"] for i in range(4)])
        assert sorted(rows.flatten().tolist()) == list(range(32))
        assert (rows.diff(dim=1) == 1).all()  # text inside a window stays in order
        epochs.append(rows[:, 0].tolist())
    assert epochs[0] != epochs[1]


def test_a_batch_depends_on_its_number_alone() -> None:
    one, two = windows(80), windows(80)
    forward = [one.batch(i)["input_ids"] for i in range(25)]
    backward = [two.batch(i)["input_ids"] for i in reversed(range(25))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    other = windows(80, seed=2)
    assert any(not torch.equal(a, other.batch(i)["input_ids"]) for i, a in enumerate(forward))


def test_labels_are_the_input_in_memory_of_their_own() -> None:
    batch = windows(80).batch(0)
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].dtype == torch.int64
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()


def test_what_is_beside_goes_with_every_batch() -> None:
    deck = Windows(torch.arange(80), batch=2, seq=4, seed=1, beside={"use_cache": False})
    assert [deck.batch(i)["use_cache"] for i in range(3)] == [False] * 3


def test_a_text_shorter_than_a_batch_is_refused_with_both_figures() -> None:
    with pytest.raises(UsageError, match=r"has 7 tokens and one batch of 2 x 4 needs 8"):
        windows(7)
    assert windows(8).per_epoch == 1


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    windows(80).check_range("bytes", 80)
    with pytest.raises(ModelError, match=r"gives token 79 and the model's vocabulary has 79"):
        windows(80).check_range("bytes", 79)


def test_a_folder_without_tokenizer_means_bytes(tmp_path: Path) -> None:
    assert isinstance(find_tokenizer(None), ByteTokenizer)
    assert isinstance(find_tokenizer(tmp_path), ByteTokenizer)


def test_a_model_brings_its_own_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<end>": 0, "red": 1, "blue": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="?")
    saved.save_pretrained(tmp_path / "model")
    tokenizer = find_tokenizer(tmp_path / "model")
    assert isinstance(tokenizer, FolderTokenizer)
    assert tokenizer.encode("blue red green").tolist() == [2, 1, 3, 0]
    tokenizer.save(tmp_path / "copy")
    assert find_tokenizer(tmp_path / "copy").encode("red").tolist() == [1, 0]


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"cannot read the tokenizer of"):
        find_tokenizer(tmp_path)
