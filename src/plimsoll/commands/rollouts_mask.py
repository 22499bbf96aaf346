"""Responses by tokens, with those marked that are learned from: `plimsoll rollouts --mask`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from plimsoll.errors import ConfigError
from plimsoll.run.directory import RunDirectory
from plimsoll.run.responses import ResponseGroup, ResponsePiece, SampledResponse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENS = ("group", "sample_index", "prompt_tokens", "tokens", "loss_mask")


def mark_learned_tokens(groups: Sequence[ResponseGroup], file: Path) -> list[ResponseGroup]:
    """Return the groups with each response as the text of all its tokens.

    Special tokens and those of the prompt are included. Lines of tokens that are learned from begin
    with `+`. `file` has the trajectories, in a run.directory.

    Raises ConfigError if the run's tokenizer is not found, or the file is of an older version,
    without masks.
    """
    tokenizer = _tokenizer(file)
    try:
        earlier = {"earlier"} & {*pq.read_schema(file).names}
        rows = pq.read_table(file, columns=[*_TOKENS, *earlier]).to_pylist()
    except pa.ArrowException as error:
        raise ConfigError(
            f"{file} has not the columns {', '.join(_TOKENS)}. An older version wrote it; leave "
            "--mask out."
        ) from error
    by_response = {(row["group"], row["sample_index"]): row for row in rows}

    def with_marks(response: SampledResponse) -> SampledResponse:
        row = by_response[response.group, response.sample_index]
        return replace(response, pieces=tuple(_branches(row, tokenizer)))

    return [ResponseGroup([*map(with_marks, group.responses)]) for group in groups]


def _tokenizer(file: Path) -> PreTrainedTokenizerBase:
    config = RunDirectory(file.absolute().parent.parent).config_path
    if not config.is_file():
        raise ConfigError(
            f"--mask reads tokens by the tokenizer of the run, and {config} is not there. Give a "
            "run.directory, or a file of its folder trajectories."
        )
    from plimsoll.jobs.which import load_any  # most who read rollouts do not need it
    from plimsoll.model.load import load_tokenizer

    model = load_any(str(config)).actor.model
    return load_tokenizer(model.path, model.trust_remote_code)


def _branches(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> Iterator[ResponsePiece]:
    """Yield the pieces of a response, or of each branch of an episode."""
    branches = [*(row.get("earlier") or ()), row]
    for number, branch in enumerate(branches, 1):
        if len(branches) > 1:
            yield ResponsePiece(
                "\n" * (number > 1) + f"[branch {number} of {len(branches)}]\n", "branch"
            )
        yield from _pieces(branch, tokenizer)


def _pieces(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Iterator[ResponsePiece]:
    tokens = [*row["prompt_tokens"], *row["tokens"]]
    learned = [*[False] * len(row["prompt_tokens"]), *row["loss_mask"]]
    spans = [[*span] for _, span in groupby(range(len(tokens)), learned.__getitem__)]
    for number, span in enumerate(spans):
        text = str(tokenizer.decode([tokens[i] for i in span], skip_special_tokens=False))
        mark, kind = ("+ ", "learned") if learned[span[0]] else ("  ", "other")
        lines = "\n".join(f"{mark}{line}" for line in text.split("\n"))
        yield ResponsePiece(lines + "\n" * (number + 1 < len(spans)), kind)
