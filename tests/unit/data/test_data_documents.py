"""Text that is learned whole: documents, cut without a loss, and whole conversations."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast as Tokenizer

from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.data.dataset import load_samples
from plimsoll.data.loading import Loaded
from plimsoll.data.template import make_template
from plimsoll.errors import ConfigError, DataError
from plimsoll.records import Sample

TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "bye"},
]


def write(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_text(path: Path, tokenizer: Tokenizer, **settings: Any) -> Loaded[Sample]:
    data = DataConfig(train=SourceConfig(path=str(path), text="body"), **settings)
    [source] = data.train_sources().values()
    return load_samples(data, source, make_template(tokenizer, data.chat_template, data.system))


@pytest.mark.parametrize("at_once", [1, 3000])
def test_long_documents_are_tokenized_a_few_at_a_time(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """The tokenizer's result takes dozens of times the memory of what is kept, here 25 MB."""
    file = write(tmp_path, *({"body": "yo" * length} for length in range(600, 700)))
    together = load_text(file, tokenizer, max_tokens=100)
    monkeypatch.setattr("plimsoll.data.pieces.TOKENIZED_AT_ONCE", at_once)
    tracemalloc.start()
    apart = load_text(file, tokenizer, max_tokens=100)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [one.tokens.tolist() for one in apart.items] == [
        one.tokens.tolist() for one in together.items
    ]
    assert peak < 4 * 10**6, peak


def test_a_row_of_20_megabytes_is_refused_before_it_is_tokenized(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Each character is a token; lists of them alone would take a gigabyte."""
    file = write(tmp_path, {"body": "hi bye"}, {"body": "yo" * 10**7})
    tracemalloc.start()
    with pytest.raises(DataError, match=r":2: .*20,000,000 .*4,000,000"):
        load_text(file, tokenizer, max_tokens=100)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * 10**8, peak


def test_the_longest_row_is_read(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plimsoll.data.loading.MOST_CHARACTERS", 6)
    loaded = load_text(
        write(tmp_path, {"body": "hi bye"}, {"body": "bye bye"}),
        tokenizer,
        max_tokens=100,
        on_bad_row="skip",
    )
    assert (len(loaded.items), [bad.line for bad in loaded.bad_rows]) == (1, [2])


def load_whole(path: Path, tokenizer: Tokenizer, **settings: Any) -> Sequence[Sample]:
    source = SourceConfig(path=str(path), messages="messages")
    data = DataConfig(train=source, **settings)
    template = make_template(tokenizer, data.chat_template, data.system)
    return load_samples(data, source, template, learned="all").items


def test_a_document_is_learned_to_its_end(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The end-of-sequence token follows it, and no template or system message surrounds it."""
    path = write(tmp_path, {"body": "To be, "}, {"body": "or not."})
    samples = load_text(path, tokenizer, system="Be brief.").items
    assert [tokenizer.decode(s.tokens) for s in samples] == [
        "To be, <|im_end|>",
        "or not.<|im_end|>",
    ]
    assert [s.loss_mask.tolist() for s in samples] == [[False] + [True] * 7] * 2


def test_a_tokenizer_that_begins_texts_begins_documents(
    base_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = write(tmp_path, {"body": "abcdefg"})
    samples = load_text(path, base_tokenizer, chat_template="none", max_tokens=4).items
    assert [base_tokenizer.decode(s.tokens) for s in samples] == ["<s>abc", "cdef", "fg</s>"]


TOKENS = st.lists(st.text("ab ", min_size=1, max_size=60), min_size=1, max_size=4)


@given(documents=TOKENS, longest=st.integers(2, 20))
def test_nothing_of_a_long_document_is_lost_or_learned_twice(
    documents: list[str],
    longest: int,
    tokenizer: Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    documents = [f"x{document}" for document in documents]  # not only white space
    path = write(tmp_path_factory.mktemp("cut"), *({"body": body} for body in documents))
    samples = load_text(path, tokenizer, max_tokens=longest).items
    assert max(len(s.tokens) for s in samples) <= longest
    expected = []
    for document in documents:
        expected += tokenizer(f"{document}<|im_end|>")["input_ids"][1:]
    assert np.concatenate([s.tokens[s.loss_mask] for s in samples]).tolist() == expected
    full = [s for s in samples if s.tokens[-1] != tokenizer.eos_token_id]
    assert all(len(s.tokens) == longest for s in full)


def test_bad_documents_are_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"body": ""}, {"title": "t"}, {"body": 7}, {"body": ["a"]}, {"body": "\ud83d"}]
    path = write(tmp_path, *rows, {"body": "good"})
    loaded = load_text(path, tokenizer, on_bad_row="skip")
    assert len(loaded.items) == 1
    assert [(bad.file, bad.line, bad.field) for bad in loaded.bad_rows] == [
        (str(path), line, "body") for line in range(1, 6)
    ]
    words = ("empty", "missing", "number", "list", "U+D83D")
    for bad, word in zip(loaded.bad_rows, words, strict=True):
        assert word in bad.problem
    with pytest.raises(DataError, match=r"rows\.jsonl:2: body: .*missing"):
        load_text(path, tokenizer)
    with pytest.raises(DataError, match=r":1: body: .* 1 token"):
        load_text(write(tmp_path, {"body": "good"}), tokenizer, max_tokens=1)


def test_a_wrong_column_is_named_with_its_source(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path, {"body": "good"})
    train = {"books": {"path": str(path), "text": "bdy"}}
    data = DataConfig.model_validate({"train": train})
    [source] = data.train_sources().values()
    expected = r"`data\.train\.books\.text: bdy`: no row of .* Did you mean 'body'\?"
    with pytest.raises(ConfigError, match=expected):
        load_samples(data, source, make_template(tokenizer, None, None))


def test_documents_need_a_token_that_ends_them(tokenizer: Tokenizer, tmp_path: Path) -> None:
    endless = Tokenizer(tokenizer_object=tokenizer.backend_tokenizer)
    endless.chat_template = tokenizer.chat_template
    with pytest.raises(ConfigError, match=r"has none: set its `eos_token`"):
        load_text(write(tmp_path, {"body": "good"}), endless)


def test_a_whole_conversation_is_learned_with_its_template(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    [sample] = load_whole(write(tmp_path, {"messages": TURNS}), tokenizer)
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TURNS)
    assert tokenizer.decode(sample.tokens) == text
    assert sample.loss_mask.tolist() == [False] + [True] * (len(sample.tokens) - 1)


def test_a_whole_conversation_needs_no_assistant_and_no_stable_turns(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A template that rewrites earlier turns hides where turns begin; that is not needed here."""
    jinja = "{{ messages | map(attribute='content') | join }}{{ messages | length }}"
    samples = load_whole(
        write(tmp_path, {"messages": TURNS[:1]}, {"messages": TURNS}),
        tokenizer,
        chat_template=jinja,
    )
    assert [tokenizer.decode(s.tokens) for s in samples] == ["hi1", "hiyobye3"]


def test_a_whole_plain_conversation_ends_once(base_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """This holds even if the last turn is not the assistant's."""
    path = write(tmp_path, {"messages": TURNS}, {"messages": TURNS[:2]})
    samples = load_whole(path, base_tokenizer, chat_template="none", system="sys ")
    texts = [base_tokenizer.decode(s.tokens) for s in samples]
    assert texts == ["<s>sys hiyobye</s>", "<s>sys hiyo</s>"]
    assert all(s.loss_mask.tolist() == [False] + [True] * (len(s.tokens) - 1) for s in samples)
