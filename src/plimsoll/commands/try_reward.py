"""Call the rewards of a config on the first rows, before any model is loaded.

`plimsoll try-reward CONFIG.yaml`

Each row gets three responses: its reference, the reference of another row, and no text. So a reward
that is never given the answer, or reads it in another form, shows before a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from plimsoll.commands.preflight import check_first_columns, check_source, reward_problems
from plimsoll.config.data import SourceConfig
from plimsoll.config.problems import refuse
from plimsoll.config.reward import RewardConfig
from plimsoll.config.rl import RlConfig
from plimsoll.data.dataset import read_prompt
from plimsoll.data.report import BadRow, RowProblem
from plimsoll.data.sources import read_rows
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.jobs.which import load_any
from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.reward.adapters import reward_function
from plimsoll.reward.references import is_of_episodes
from plimsoll.reward.score import open_rewards
from plimsoll.spec.run_spec import RunSpec

_SHOWN = 28
"""The most characters of a response in the table."""
_FAILED = "failed"


@dataclass(frozen=True)
class TriedResponse:
    """A response to a row, with the value that each reward gave it."""

    row: int
    """The number of the row, from 0."""
    kind: str
    """Where the text comes from: `reference`, `another row's` or `empty`."""
    trajectory: Trajectory
    values: Mapping[str, float | None]
    """The values by reward; None where the reward failed."""


@dataclass(frozen=True)
class TriedRewards:
    """What the rewards of a config gave to the first rows of a source."""

    source: str
    responses: tuple[TriedResponse, ...]
    failures: tuple[str, ...]
    """The first failure of each reward that failed."""
    left_out: tuple[str, ...]
    """Parts of the reward that are not called, each with the reason."""

    def text(self) -> str:
        """Return the table, and below it what stands out."""
        names = list(self.responses[0].values)
        rows = [["row", "response", *names]]
        for tried in self.responses:
            shown = " ".join(tried.trajectory.response_text.split())[:_SHOWN]
            label = f"{tried.kind}: {shown}" if shown else tried.kind
            values = (tried.values[name] for name in names)
            rows.append(
                [str(tried.row), label, *(_FAILED if v is None else f"{v:.4g}" for v in values)]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        head = f"first rows of {self.source}; values before weight and normalize"
        notes = [*(f"left out: {part}" for part in self.left_out), *self._remarks()]
        return "\n".join([head, "", *table, *([""] if notes else []), *notes])

    def _remarks(self) -> Iterator[str]:
        for name in self.responses[0].values:
            values = {tried.values[name] for tried in self.responses}
            if len(values) == 1 and None not in values:
                yield f"note: rewards.{name} gives all responses the same value, {values.pop():.4g}"


def try_rewards(config: str, flags: Sequence[str], count: int) -> TriedRewards:
    """Return the values of a config's rewards on the first `count` rows of its first source.

    Raises ConfigError if the config has no rewards that can be called, or rows cannot be read.
    """
    spec = load_any(config, flags)
    loaded = spec.config
    if not isinstance(loaded, RlConfig) or not loaded.rewards:
        raise ConfigError(
            f"{config} has no `rewards` to call. Give a config of plimsoll rl; reward models need "
            f"a run, or `plimsoll serve-reward`."
        )
    key, source = next(iter(spec.data.train_sources().items()))
    refuse(check_source(key, source))
    refuse(check_first_columns(key, source, spec.data.on_bad_row))
    refuse(reward_problems(spec))
    left_out = [f"{name}, a reward model: it is loaded in a run" for name in loaded.scoring_models]
    called: dict[str, RewardConfig] = {}
    for name, part in loaded.rewards.items():
        if part.name and is_of_episodes(reward_function(part)) and loaded.environments:
            left_out.append(f"rewards.{name}: it reads episodes, which only a run plays")
        else:
            called[name] = part
    if not called:
        raise ConfigError(f"No reward of {config} can be called: {'; '.join(left_out)}.")
    prompts = _first_prompts(spec, source, count)
    responses = [*_responses(prompts)]
    values: dict[str, list[float | None]] = {}
    failures: list[str] = []
    for name, part in called.items():
        values[name] = _values(name, part, [t for *_, t in responses], failures)
    tried = (
        TriedResponse(row, kind, trajectory, {name: values[name][i] for name in values})
        for i, (row, kind, trajectory) in enumerate(responses)
    )
    return TriedRewards(key, tuple(tried), tuple(failures), tuple(left_out))


def _first_prompts(spec: RunSpec[RlConfig], source: SourceConfig, count: int) -> list[Prompt]:
    prompts = []
    for index, row in enumerate(islice(read_rows(source, whole=True), count)):
        if isinstance(row, BadRow):
            raise ConfigError(f"{row}.")
        sampling, known = spec.config.rollout.sampling, spec.config.environments
        try:
            prompts.append(read_prompt(row, index, source, sampling, known))
        except RowProblem as error:
            bad = BadRow(row.file, row.line, error.field, error.problem)
            raise ConfigError(f"{bad}.") from error
    if not prompts:
        raise ConfigError(f"{source.path} has no rows.")
    return prompts


def _responses(prompts: Sequence[Prompt]) -> Iterator[tuple[int, str, Trajectory]]:
    """Yield the responses to each prompt: the row, the kind of response, and the response.

    Each has a group of its own, as a failure ends the scoring of its group.
    """
    references = [prompt.reference for prompt in prompts]
    texts = [
        (prompt, kind, text)
        for prompt in prompts
        for kind, text in (
            ("reference", prompt.reference),
            ("another row's", next((r for r in references if r and r != prompt.reference), None)),
            ("empty", ""),
        )
        if text is not None
    ]
    none = np.zeros(0, np.int64)
    for group, (prompt, kind, text) in enumerate(texts):
        logprobs = np.zeros(0, np.float32)
        response = single_turn(prompt, 0, none, logprobs, text, "stop", 0, group=group)
        yield prompt.index, kind, response


def _values(
    name: str, part: RewardConfig, trajectories: Sequence[Trajectory], failures: list[str]
) -> list[float | None]:
    """Return a reward's value of each trajectory, None where it failed, and add its failure."""
    once = part.model_copy(update={"retries": 0, "normalize": False})
    try:
        with open_rewards({name: once}, keeps_bad_numbers=True) as scorer:
            scored = scorer.submit(trajectories).result()
    except ConfigError:
        raise
    except PlimsollError as error:
        failures.append(str(error))
        return [None] * len(trajectories)
    failures += [str(failure) for failure in scored.failures[:1]]
    values = {t.group: t.rewards[0].value for t in scored.trajectories}
    return [values.get(t.group) for t in trajectories]
