"""Fingerprints of rows: everything that is learned from changes them, and so does the order."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import xxhash

from plimsoll.data.cache import token_versions
from plimsoll.data.stored import fingerprint
from plimsoll.jobs.sft import SftConfig
from plimsoll.jobs.which import spec_of
from plimsoll.records import LabelledResponse, LabelledSteps, Pair, Prompt, Row, Sample
from plimsoll.run.state import RunState, SourceState
from plimsoll.train.saving import row_count_changes, sources_of, version_changes


def sample(*tokens: int, loss_mask: int = 1) -> Sample:
    places = np.arange(len(tokens))
    return Sample(np.array(tokens, dtype=np.int32), places >= len(tokens) - loss_mask)


def steps(*labels: float) -> LabelledSteps:
    return LabelledSteps(sample(1, 2, 3, loss_mask=2), np.array(labels, dtype=np.float32))


def prompt(text: str, reference: str | None) -> Prompt:
    return Prompt(0, np.array([1, 2], dtype=np.int32), text, reference)


ONE, OTHER = sample(1, 2), sample(1, 3)
DIFFERENT: dict[str, list[list[Row | Prompt]]] = {
    "samples": [[ONE, OTHER], [OTHER, ONE], [ONE], [ONE, sample(1, 3, 3)], [sample(1, 2, 1, 3)]],
    "learned": [[sample(1, 2, 3)], [sample(1, 2, 3, loss_mask=2)]],
    "pairs": [[Pair(ONE, OTHER)], [Pair(OTHER, ONE)], [Pair(ONE, OTHER, margin=0.5)]],
    "responses": [[LabelledResponse(ONE, True)], [LabelledResponse(ONE, False)]],
    "steps": [[steps(1, 0)], [steps(0, 1)]],
    "prompts": [[prompt("a", "1")], [prompt("a", "2")], [prompt("a", None)], [prompt("b", "1")]],
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_is_learned_from_decides_the_fingerprint(name: str) -> None:
    prints = [fingerprint(items) for items in DIFFERENT[name]]
    assert len(set(prints)) == len(prints)
    assert prints == [fingerprint(list(items)) for items in DIFFERENT[name]]


def state(data_rows: int, sources: dict[str, SourceState] | None) -> RunState:
    return RunState(3, 12, data_rows, 3, 0.0, 1.0, sources=sources)


def test_counts_that_changed_are_listed_by_source() -> None:
    """The number of all rows together may be the same."""
    before = {
        "data.train.sums": SourceState("a", 16, "b"),
        "data.train.pages": SourceState("a", 1, "c"),
        "data.eval": SourceState("a", 4, "d"),
        "data.train.gone": SourceState("a", 4, "d"),
    }
    now = {
        "data.train.sums": SourceState("a", 15, "e"),
        "data.train.pages": SourceState("a", 2, "c"),
        "data.eval": SourceState("a", 5, "f"),
    }
    facts = (
        r"^data\.train\.sums .*\b16 .*\b15 now.* order ",
        r"^data\.train\.pages .*\b1 .*\b2 now.* order ",
        r"^data\.eval .*\b4 .*\b5 now.* evaluations ",
    )
    changes = list(row_count_changes(state(17, before), 17, now))
    for change, fact in zip(changes, facts, strict=True):
        assert re.search(fact, change)
    assert list(row_count_changes(state(17, before), 17, before)) == []
    [old] = row_count_changes(state(2, None), 1, now)
    assert re.search(r"^data\.train .*\b2 .*\b1 now", old)


def test_settings_at_their_defaults_are_no_part_of_what_a_checkpoint_says_was_asked_for() -> None:
    """A key that is added later must not change the checkpoint's hash."""
    source = {"path": "sums.jsonl", "prompt": "q", "response": "a"}
    config = {
        "run": {"directory": "run", "steps": 2},
        "data": {"train": source, "max_tokens": 8, "shuffle": False},
        "actor": {"model": {"path": "model"}},
    }
    sources = sources_of(spec_of(SftConfig.model_validate(config)), {"data.train": [ONE]})
    settings = {
        "source": source,
        "data": {"max_tokens": 8},
        "model": ["model", False],
        "learned": "assistant",
    }
    content = xxhash.xxh3_64_hexdigest(json.dumps(settings, sort_keys=True).encode())
    assert sources == {"data.train": SourceState(content, 1, fingerprint([ONE]))}


def test_libraries_that_changed_are_listed() -> None:
    now = token_versions()
    assert {"tokenizers", "transformers", "jinja2"} <= now.keys()
    assert version_changes(now) == version_changes({}) == version_changes({"gone": "1"}) == []
    assert version_changes({**now, "jinja2": "0.1"}) == [f"jinja2: 0.1 -> {now['jinja2']}"]


def test_the_date_is_no_part_of_what_a_checkpoint_says_was_asked_for() -> None:
    """The run keeps its date. Another one that is given changes the rows, which are compared."""
    config: dict[str, dict[str, Any]] = {
        "run": {"directory": "run", "steps": 2},
        "data": {"train": {"path": "sums.jsonl", "prompt": "q", "response": "a"}},
        "actor": {"model": {"path": "model"}},
    }
    dated = {**config, "data": {**config["data"], "date": "2026-07-31"}}
    both = (spec_of(SftConfig.model_validate(values)) for values in (config, dated))
    first, second = (sources_of(spec, {"data.train": [ONE]}) for spec in both)
    assert first == second
