"""Where rows come from and how they become tokens."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from plimsoll.config.base import (
    OptionValue,
    PositiveFloat,
    PositiveInt,
    Settings,
    WrittenPath,
)
from plimsoll.config.rollout import SamplingConfig

LearnedTokens = Literal["assistant", "all"]
"""Which tokens of a conversation are learned."""


class GenerateConfig(Settings):
    """Rows that a library of tasks generates; the same settings always give the same rows."""

    tasks: tuple[str, ...] | dict[str, dict[str, OptionValue | tuple[OptionValue, ...]]]
    """The names of its tasks, such as `[chain_sum, gcd]`; or each name with the task's own options
    below it."""
    size: Annotated[int, Field(ge=1, le=2**20)]
    """Rows of each task."""
    seed: Annotated[int, Field(ge=0, le=2**12 - 1)]
    """Another seed gives other rows, such as held-out ones."""

    def options(self) -> dict[str, dict[str, object]]:
        """Return the options of each task, by its name."""
        if isinstance(self.tasks, tuple):
            return {name: {} for name in self.tasks}
        return {name: dict(options) for name, options in self.tasks.items()}


class SourceConfig(Settings):
    """A file or data set, and the columns to read.

    Either `messages` (OpenAI-style), or `prompt` and `response` columns, or `text`; for preference
    pairs `chosen` and `rejected`, with `prompt` where they do not hold it; for a process reward
    model `steps` and `labels` beside the prompt. `a.b` is the column b within the objects of a.
    """

    path: WrittenPath
    """A .jsonl, .jsonl.gz, .json or .parquet file, a directory of them, a `datasets` directory, or
    a hub name; beside `generate`, the library that generates: `reasoning_gym`."""
    name: str | None = None
    """The configuration of a hub's data set that has several, such as `main` of openai/gsm8k."""
    split: str = "train"
    """The split, if the source has several."""
    generate: GenerateConfig | None = None
    """Have the library at `path` generate the rows."""
    messages: str | None = None
    """Column with a list of turns, {role, content} or ShareGPT's {from, value}. Give this, or
    `prompt`."""
    prompt: str | None = None
    """Column with the prompt: text, or a list of turns."""
    response: str | None = None
    """Column with the response: text, or a list of turns (SFT, distillation, KTO)."""
    text: str | None = None
    """Column with a document of plain text, learned in full (SFT): continued pretraining. No
    template is put around it; the end-of-sequence token comes after it."""
    chosen: str | None = None
    """Column with the better response: text or turns beside a prompt column, or the whole
    conversation as turns or as a dialogue of HH-RLHF's form (preference pairs)."""
    rejected: str | None = None
    """Column with the worse response, in the form of `chosen` (preference pairs)."""
    margin: str | None = None
    """Column with a number: by how much the better response's score should be ahead (reward
    model)."""
    steps: str | None = None
    """Column with the steps of a response: a list of texts (process reward model)."""
    labels: str | None = None
    """Column with a label for each step: a list of true or false, or of numbers from 0 (wrong) to 1
    (right) (process reward model)."""
    label: str | None = None
    """Column that says whether the response is desirable: true, false, 1 or 0 (KTO)."""
    tools: str | None = None
    """Column with the tools that a conversation may call, which the chat template describes: a list
    of JSON schemas, or JSON text of one."""
    reference: str | None = None
    """Column with the reference answer that rewards compare with (PPO): text or a number; or, for
    functions that get it as it is, true or false, a list or an object."""
    source: str | None = None
    """Column with the name of each row's source, such as verl's `data_source`, by which rewards and
    evaluations tell rows apart (PPO); default: the name in the config."""
    max_new_tokens: str | None = None
    """Column with the longest response to each prompt, in tokens: a whole number, at most
    `rollout.sampling.max_new_tokens` (PPO)."""
    order_by: str | None = None
    """Column with a number, such as a difficulty: in every epoch the prompts of the source are
    drawn from the lowest to the highest. Prompts of the same number are in `data.shuffle`'s order
    (PPO)."""
    environment: str | None = None
    """Column with the name of each row's environment, where `environments` has several (PPO)."""
    chat_template: str | None = None
    """The chat template of these rows, in the forms of `data.chat_template`; default: that
    template."""
    limit: PositiveInt | None = None
    """Use only this many rows, the first ones."""
    streaming: bool = False
    """Read and tokenize rows as the run reaches them, and keep none (SFT, DPO, distillation)."""

    def columns(self) -> frozenset[str]:
        """Return the columns that the source names."""
        named = (getattr(self, setting) for setting in COLUMNS)
        return frozenset(column for column in named if column is not None)


_NO_COLUMNS = ("path", "generate", "name", "split", "chat_template", "limit", "streaming")
COLUMNS = tuple(name for name in SourceConfig.model_fields if name not in _NO_COLUMNS)
"""The settings of a source that name columns."""


class WeightedSource(SourceConfig):
    """One of several sources of `data.train`, under a name of its own."""

    weight: PositiveFloat = 1.0
    """How often its rows are drawn, relative to the weights of the other sources."""


class EvalSource(SourceConfig):
    """Held-out rows: those of `data.eval`, or one of several sets under a name of its own (PPO)."""

    responses: PositiveInt = 1
    """Responses to each prompt (PPO). If there are several, pass@k and maj@k are estimated, too."""
    pass_by: str | None = None
    """The part of the reward by which a response passes, for pass@k and maj@k (PPO); default: the
    part of `rewards` with the greatest weight, the first of several such."""
    pass_threshold: float | None = None
    """A response passes if that part of the reward is at least this (PPO); default: 1."""
    sampling: SamplingConfig | None = None
    """How its prompts are answered (PPO). Keys that are left out have their defaults. Default: as
    `eval_sampling` says."""


EVALUATED = tuple(n for n in EvalSource.model_fields if n not in SourceConfig.model_fields)
"""The settings of held-out rows that say how the rows are answered, not which rows they are."""


def _form(value: object, keys: Collection[str]) -> str:
    """Return the tag of the form of sources: `<source>` for one, `<mixture>` for several by name.

    `keys` are the keys that a single source may have.
    """
    if not isinstance(value, dict) or value.keys() & set(keys):
        return "<source>"
    entries = any(isinstance(entry, dict | SourceConfig) for entry in value.values())
    return "<mixture>" if entries else "<source>"


TrainSources = Annotated[
    Annotated[SourceConfig, Tag("<source>")]
    | Annotated[dict[str, WeightedSource], Tag("<mixture>")],
    Discriminator(lambda value: _form(value, SourceConfig.model_fields)),
]
"""One source, or several by name."""

EvalSources = Annotated[
    Annotated[EvalSource, Tag("<source>")] | Annotated[dict[str, EvalSource], Tag("<mixture>")],
    Discriminator(lambda value: _form(value, EvalSource.model_fields)),
]
"""One set, or several by name."""


def _check_date(text: str) -> str:
    datetime.fromisoformat(text)
    return text


class DataConfig(Settings):
    """Rows, chat template, lengths, and what to do with bad rows."""

    train: TrainSources
    """The rows to learn from, or in PPO the prompts to sample for: one source; or several, each
    under a name of its own and with a weight."""
    eval: EvalSources | None = None
    """Held-out rows, never trained on: one source; or in PPO several, each under a name of its
    own."""
    chat_template: str | None = None
    """A Jinja chat template, or a path to one; default: the tokenizer's own.
    `none` joins prompt and response as plain text and ends with the end-of-sequence token."""
    system: str | None = None
    """A system message put before every conversation that has none."""
    date: Annotated[str, AfterValidator(_check_date)] | None = None
    """The date that chat templates write (`strftime_now`), as in `2026-07-31` or
    `2026-07-31T12:00`; default: when the run began, which a resumed run keeps."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """stop: refuse the data with file, line and field; skip: count and list them in the
    run directory."""
    over_long: Literal["refuse", "truncate"] = "refuse"
    """Whether a sequence longer than max_tokens is a bad row, or is cut: at its end, but PPO's
    prompts at their beginning. A document of plain text is cut into pieces, and nothing is lost."""
    max_tokens: PositiveInt = 2048
    """The longest sequence, or in PPO the longest prompt, in tokens."""
    cache: WrittenPath | None = None
    """The directory in which tokenised rows are kept for later starts; `none`: in none. Default:
    the environment variable PLIMSOLL_CACHE, or `~/.cache/plimsoll`."""
    processes: PositiveInt | None = None
    """Processes that tokenise a source of many rows; default: as many as there are cores, at most
    16. The rows are the same with any number."""
    step_separator: str = "\n"
    """The text between the steps of a response (process reward model)."""
    shuffle: bool = True
    """Draw a new order every epoch, from the run's seed; for a source with `order_by`, among
    prompts of the same number."""

    @property
    def rendered_by(self) -> str | None:
        """The chat template as written; `none` if all rows are documents of plain text."""
        only_text = all(source.text is not None for source in self.sources().values())
        return "none" if only_text else self.chat_template

    def template_of(self, source: SourceConfig) -> str | None:
        """Return the chat template of a source's rows as it is written; `none` for documents."""
        return "none" if source.text is not None else source.chat_template or self.chat_template

    def train_sources(self) -> dict[str, SourceConfig]:
        """Return the sources to learn from, by their dotted keys."""
        if isinstance(self.train, SourceConfig):
            return {"data.train": self.train}
        return {f"data.train.{name}": source for name, source in self.train.items()}

    def eval_sources(self) -> dict[str, EvalSource]:
        """Return the sources that are held out, by their dotted keys."""
        if isinstance(self.eval, EvalSource):
            return {"data.eval": self.eval}
        return {f"data.eval.{name}": source for name, source in (self.eval or {}).items()}

    def sources(self) -> dict[str, SourceConfig]:
        """Return all sources, by their dotted keys."""
        return {**self.train_sources(), **self.eval_sources()}


def set_name(key: str) -> str:
    """Return the config's name for one of several sources; empty for a single source.

    `key` is the dotted key of the source.
    """
    return ".".join(key.split(".")[2:])


def template_file(chat_template: str) -> Path | None:
    """Return the file that a `chat_template` names, or None if it is Jinja itself."""
    return None if "{" in chat_template else Path(expanduser(chat_template))
