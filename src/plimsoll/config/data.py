"""Where rows come from and how they become tokens."""

from __future__ import annotations

from typing import Literal

from plimsoll.config.base import PositiveInt, Settings


class SourceConfig(Settings):
    """A file or data set, and the columns to read.

    Either `messages` (OpenAI-style), or `prompt` and `response` columns; for preference pairs
    `chosen` and `rejected`, with `prompt` where they do not hold it.
    """

    path: str
    """A .jsonl, .jsonl.gz or .parquet file, a directory of them, a `datasets` directory, or a hub
    name."""
    name: str | None = None
    """The configuration of a hub's data set that has several, such as `main` of openai/gsm8k."""
    split: str = "train"
    """The split, where the source has several."""
    messages: str | None = None
    """Column with a list of {role, content} turns. Give this, or `prompt`."""
    prompt: str | None = None
    """Column with the prompt as text."""
    response: str | None = None
    """Column with the response as text (SFT)."""
    chosen: str | None = None
    """Column with the better response: text beside a prompt column, or the whole conversation as
    messages or as a dialogue of HH-RLHF's form (preference pairs)."""
    rejected: str | None = None
    """Column with the worse response, in the form of `chosen` (preference pairs)."""
    reference: str | None = None
    """Column with the reference answer (RL)."""
    limit: PositiveInt | None = None
    """Use only the first rows, this many."""


class DataConfig(Settings):
    """Rows, chat template, lengths, and what to do with bad rows."""

    train: SourceConfig
    """The rows to learn from (SFT) or to sample for (RL)."""
    eval: SourceConfig | None = None
    """Held-out rows, never trained on."""
    chat_template: str | None = None
    """A Jinja chat template, or a path to one; default: the tokenizer's own.
    `none` joins prompt and response as plain text and ends with the end-of-sequence token."""
    system: str | None = None
    """A system message put before every conversation that has none."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """stop: refuse the data with file, line and field; skip: count and list them in the
    run directory."""
    over_long: Literal["refuse", "truncate"] = "refuse"
    """A sequence over max_tokens is a bad row, or is cut at the end."""
    max_tokens: PositiveInt = 2048
    """The longest sequence (SFT, pairs), or the longest prompt (RL), in tokens."""
    shuffle: bool = True
    """A new order every epoch, from the run's seed."""
