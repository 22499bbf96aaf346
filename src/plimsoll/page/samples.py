"""What was sampled in a step as JSON: the groups in short, and one in full, with the advantage of
each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from plimsoll.config.yaml_tree import value_at
from plimsoll.errors import ConfigError
from plimsoll.page.watched import Watched
from plimsoll.run.responses import (
    ResponseGroup,
    SampledResponse,
    best_and_worst,
    excerpt,
    read_groups,
)

_EXCERPT = 160
_ENDS = 3
"""Responses that are shown as the best of a step, and as the worst."""
_COLUMNS = ("sample_index", "tokens", "loss_mask", "advantages", "turns", "earlier", "response")
ScoredText = tuple[str, float | None]
"""A text, and the advantage of its tokens; None where they are not learned."""


def groups(run: Watched, step: int | None) -> dict[str, Any]:
    """The groups of a step, None for the last, in short; and which steps there are."""
    steps = run.run.trajectories()
    if not steps and step is None:
        return {"step": None, "steps": [], "groups": []}
    step = max(steps) if step is None else step
    return {
        "step": step,
        "steps": list(steps),
        "groups": [_short(group) for group in _groups(_file(run, step))],
    }


def group(run: Watched, step: int, number: int) -> dict[str, Any]:
    """A group in full: responses from the highest reward to the lowest."""
    path = _file(run, step)
    found = next((one for one in _groups(path) if one.number == number), None)
    if found is None:
        raise ConfigError(f"Step {step} of {run.name} has no group {number}.")
    tokenizer = _tokenizer(tuple(map(str, _tokenizer_files(run))))
    rows = _rows(path, found)
    first = found.responses[0]
    return {
        "step": step,
        "group": number,
        "prompt": first.prompt,
        "source": first.source,
        "reference": first.reference,
        "withTokens": tokenizer is not None,
        "responses": [_response(o, rows[o.sample_index], tokenizer) for o in found.responses],
    }


def ends(run: Watched, step: int) -> dict[str, Any]:
    """Return the best and the worst responses of a step in full, each with its prompt and group, of
    different prompts as far as there are some."""
    path = _file(run, step)
    tokenizer = _tokenizer(tuple(map(str, _tokenizer_files(run))))
    by_number = {one.number: one for one in _groups(path)}
    best, worst = best_and_worst(list(by_number.values()), _ENDS)
    rows = {n: _rows(path, by_number[n]) for n in {one.group for one in (*best, *worst)}}

    def shown(found: Sequence[SampledResponse]) -> list[dict[str, Any]]:
        return [
            {
                "group": one.group,
                "prompt": one.prompt,
                "source": one.source,
                "reference": one.reference,
                "response": _response(one, rows[one.group][one.sample_index], tokenizer),
            }
            for one in found
        ]

    return {
        "step": step,
        "withTokens": tokenizer is not None,
        "best": shown(best),
        "worst": shown(worst),
    }


def _file(run: Watched, step: int) -> Path:
    path = run.run.trajectories_path(step)
    if not path.is_file():
        raise ConfigError(f"{run.name} has no trajectories of step {step}.")
    return path


def _groups(path: Path) -> Sequence[ResponseGroup]:
    return _groups_of(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _groups_of(path: Path, written: int) -> Sequence[ResponseGroup]:
    return read_groups(path)


def _short(one: ResponseGroup) -> dict[str, Any]:
    return {
        "group": one.number,
        "prompt": excerpt(one.prompt, _EXCERPT),
        "source": one.responses[0].source,
        "reward": one.reward,
        "lowest": one.responses[-1].reward,
        "highest": one.responses[0].reward,
        "tokens": fmean(own.tokens for own in one.responses),
        "responses": len(one.responses),
        "cutOff": sum(own.cut_off for own in one.responses),
    }


def _rows(path: Path, one: ResponseGroup) -> dict[int, Mapping[str, Any]]:
    """The rows of a group as they are stored, by their place in it."""
    names = pq.read_schema(path).names
    key = "group" if "group" in names else "prompt_index"
    columns = [name for name in _COLUMNS if name in names]
    table = pq.read_table(path, columns=columns, filters=[(key, "=", one.number)])
    return {row["sample_index"]: row for row in table.to_pylist()}


def _response(
    one: SampledResponse, row: Mapping[str, Any], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    branches = [*(row.get("earlier") or ()), row]
    return {
        "sample": one.sample_index,
        "reward": one.reward,
        "parts": dict(one.parts),
        "advantage": one.advantage,
        "tokens": one.tokens,
        "version": one.version,
        "cutOff": one.cut_off,
        "branches": [list(_turns(branch, tokenizer)) for branch in branches],
    }


def _turns(row: Mapping[str, Any], tokenizer: Tokenizer | None) -> Iterator[dict[str, Any]]:
    """What each side said; a response without turns is one of the assistant."""
    whole = {"role": "assistant", "begin": 0, "end": len(row["tokens"]), "text": row["response"]}
    for turn in row.get("turns") or [whole]:
        span = slice(turn["begin"], turn["end"])
        pieces: list[ScoredText] = [(turn["text"], None)]
        if turn["role"] == "assistant" and tokenizer is not None and row.get("advantages"):
            pieces = _pieces(row, span, tokenizer)
        yield {
            "role": turn["role"],
            "reward": turn.get("reward") or 0.0,
            "problem": turn.get("problem") or "",
            "pieces": pieces,
        }


def _pieces(row: Mapping[str, Any], span: slice, tokenizer: Tokenizer) -> list[ScoredText]:
    """The tokens as text, neighbours of the same advantage as one. A token that ends within a
    character belongs to the one that completes it."""
    stream = DecodeStream(skip_special_tokens=False)
    mask = row.get("loss_mask") or [True] * len(row["tokens"])
    tokens = zip(row["tokens"][span], row["advantages"][span], mask[span], strict=True)
    found = [
        (stream.step(tokenizer, token) or "", round(advantage, 4) if learned else None)
        for token, advantage, learned in tokens
    ]
    together = groupby(found, key=lambda piece: piece[1])
    return [("".join(text for text, _ in own), advantage) for advantage, own in together]


def _tokenizer_files(run: Watched) -> Iterator[Path]:
    """Where the actor's tokenizer may lie on this machine."""
    name = "tokenizer.json"
    yield run.run.model_path / name
    path = value_at(run.settings, ("actor", "model", "path"))
    if isinstance(path, str):
        yield Path(path) / name
        cached = None if Path(path).is_dir() else _cached(path, name)
        if isinstance(cached, str):
            yield Path(cached)


def _cached(repository: str, name: str) -> object:
    try:
        return try_to_load_from_cache(repository, name)
    except ValueError:  # no name of a repository
        return None


@lru_cache(maxsize=4)
def _tokenizer(files: Sequence[str]) -> Tokenizer | None:
    """The first that is there."""
    path = next((path for path in files if Path(path).is_file()), None)
    return None if path is None else Tokenizer.from_file(path)
