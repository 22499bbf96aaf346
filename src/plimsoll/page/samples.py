"""The samples of a step as JSON.

All groups are summarised. One group can be had in full, with the advantage of each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.compute as pc
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
from plimsoll.run.trajectories import iter_bounded, row_groups_of

_EXCERPT = 160
_ENDS = 3
"""Number of responses shown as the best of a step, and as the worst."""
_COLUMNS = ("sample_index", "tokens", "loss_mask", "advantages", "turns", "earlier", "response")
ScoredText = tuple[str, float | None]
"""A text, and the advantage of its tokens; None if they are not learned from."""


def groups(run: Watched, step: int | None) -> dict[str, Any]:
    """Return summaries of a step's groups (None: the last step), and the steps with samples."""
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
    """Return a group in full, its responses from the highest reward to the lowest."""
    path = _file(run, step)
    wanted = next((candidate for candidate in _groups(path) if candidate.number == number), None)
    if wanted is None:
        raise ConfigError(f"Step {step} of {run.name} has no group {number}.")
    tokenizer = _tokenizer(tuple(_tokenizer_files(run)))
    rows = _rows(path, wanted)
    return {
        "step": step,
        **_prompt(wanted.responses[0]),
        "withTokens": tokenizer is not None,
        "responses": [_response(r, rows[r.sample_index], tokenizer) for r in wanted.responses],
    }


def _prompt(response: SampledResponse) -> dict[str, Any]:
    return {
        "group": response.group,
        "prompt": response.prompt,
        "source": response.source,
        "reference": response.reference,
    }


def ends(run: Watched, step: int) -> dict[str, Any]:
    """Return the best and the worst responses of a step in full, each to a different prompt."""
    path = _file(run, step)
    tokenizer = _tokenizer(tuple(_tokenizer_files(run)))
    by_number = {group.number: group for group in _groups(path)}
    best, worst = best_and_worst(list(by_number.values()), _ENDS)
    rows = {n: _rows(path, by_number[n]) for n in {response.group for response in (*best, *worst)}}

    def in_full(responses: Sequence[SampledResponse]) -> list[dict[str, Any]]:
        return [
            _prompt(r) | {"response": _response(r, rows[r.group][r.sample_index], tokenizer)}
            for r in responses
        ]

    return {
        "step": step,
        "withTokens": tokenizer is not None,
        "best": in_full(best),
        "worst": in_full(worst),
    }


def _file(run: Watched, step: int) -> Path:
    path = run.run.trajectories_path(step)
    if not path.is_file():
        raise ConfigError(f"{run.name} has no trajectories of step {step}.")
    return path


def _groups(path: Path) -> Sequence[ResponseGroup]:
    return _read_once(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read_once(path: Path, modified: int) -> Sequence[ResponseGroup]:
    return read_groups(path)


def _short(group: ResponseGroup) -> dict[str, Any]:
    return {
        "group": group.number,
        "prompt": excerpt(group.prompt, _EXCERPT),
        "source": group.responses[0].source,
        "reward": group.reward,
        "lowest": group.responses[-1].reward,
        "highest": group.responses[0].reward,
        "tokens": fmean(response.tokens for response in group.responses),
        "responses": len(group.responses),
        "cutOff": sum(response.cut_off for response in group.responses),
    }


def _rows(path: Path, group: ResponseGroup) -> dict[int, Mapping[str, Any]]:
    names = pq.read_schema(path).names
    key = "group" if "group" in names else "prompt_index"
    columns = [key, *(name for name in _COLUMNS if name in names)]
    found = row_groups_of(path, key, group.number)
    batches = iter_bounded(path, columns, found) if found else ()
    own_rows = (batch.filter(pc.field(key) == group.number) for batch in batches)
    return {row["sample_index"]: row for rows in own_rows for row in rows.to_pylist()}


def _response(
    response: SampledResponse, row: Mapping[str, Any], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    branches = [*(row.get("earlier") or ()), row]
    return {
        "sample": response.sample_index,
        "reward": response.reward,
        "parts": dict(response.parts),
        "advantage": response.advantage,
        "tokens": response.tokens,
        "version": response.version,
        "cutOff": response.cut_off,
        "branches": [list(_turns(branch, tokenizer)) for branch in branches],
    }


def _turns(row: Mapping[str, Any], tokenizer: Tokenizer | None) -> Iterator[dict[str, Any]]:
    """Yield the turns of both sides; a response without turns is one turn of the assistant."""
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
    """Return the text of the tokens in `span`; neighbours with equal advantages are joined.

    A token that ends inside a character has no text; the next token has the full character.
    """
    stream = DecodeStream(skip_special_tokens=False)
    mask = row.get("loss_mask") or [True] * len(row["tokens"])
    tokens = zip(row["tokens"][span], row["advantages"][span], mask[span], strict=True)
    scored = [
        (stream.step(tokenizer, token) or "", round(advantage, 4) if learned else None)
        for token, advantage, learned in tokens
    ]
    by_advantage = groupby(scored, key=lambda piece: piece[1])
    return [("".join(text for text, _ in equals), advantage) for advantage, equals in by_advantage]


def _tokenizer_files(run: Watched) -> Iterator[Path]:
    name = "tokenizer.json"
    yield run.run.model_path / name
    path = value_at(run.settings, ("actor", "model", "path"))
    if isinstance(path, str):
        yield Path(path) / name
        with suppress(ValueError):  # no name of a repository
            cached = None if Path(path).is_dir() else try_to_load_from_cache(path, name)
            if isinstance(cached, str):
                yield Path(cached)


@lru_cache(maxsize=4)
def _tokenizer(files: tuple[Path, ...]) -> Tokenizer | None:
    path = next(filter(Path.is_file, files), None)
    return None if path is None else Tokenizer.from_file(str(path))
