"""Call the rewards of a config before any model is loaded.

`plimsoll try-reward CONFIG.yaml` calls them on the first rows. Each row gets three responses: its
reference, the reference of another row, and no text. So a reward that is never given the answer, or
reads it in another form, shows before a run.

`plimsoll try-reward CONFIG.yaml --run RUN` calls them on what a step of an earlier run sampled, and
shows what each would have given beside what the run gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import inf, isclose, isnan, nan
from pathlib import Path

import numpy as np

from plimsoll.commands.preflight import check_first_columns, check_source, reward_problems
from plimsoll.config.data import SourceConfig
from plimsoll.config.problems import refuse
from plimsoll.config.reward import RewardConfig
from plimsoll.config.rl import RlConfig
from plimsoll.data.dataset import read_prompt
from plimsoll.data.fields import BadRow, RowProblem
from plimsoll.data.sources import read_rows
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.jobs.which import load_any
from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.reward.adapters import reward_function
from plimsoll.reward.references import is_of_episodes
from plimsoll.reward.score import open_rewards
from plimsoll.run.directory import existing_run
from plimsoll.run.numbers import mean, plural
from plimsoll.run.responses import excerpt
from plimsoll.run.trajectories import read_trajectories

_SHOWN = 28
"""The most characters of a response in the table."""
_FAILED = "failed"


_Scored = tuple[Trajectory, Mapping[str, float | None]]
"""A response as a run scored it, and the new values by reward; None where one failed."""


def _given(trajectory: Trajectory, name: str) -> float | None:
    return next((part.value for part in trajectory.rewards if part.name == name), None)


def _compared(pairs: Sequence[tuple[float | None, float | None]]) -> tuple[str, str, str]:
    """Return the mean before and after as text, and how many values differ (`-`: not both)."""
    before, after = ([x for x in side if x is not None] for side in zip(*pairs, strict=True))
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    changed = sum(not isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in both)
    was, now = (f"{mean(side):.4g}" if side else "-" for side in (before, after))
    return was, now, f"{changed} of {len(both)}" if both else "-"


def _align(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Return rows as lines of equally wide columns; text of the columns `left` is at the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _line(trajectory: Trajectory) -> str:
    return excerpt(trajectory.response_text, 2 * _SHOWN)


def score_again(
    config: str, flags: Sequence[str], run: Path, step: int | None, shown: int
) -> tuple[str, list[str]]:
    """Call a config's rewards on the responses of a step (None: the last) of a run.

    Return the means of each reward before and now, and the `shown` responses whose reward changed
    most, as text; and the first failure of each reward that failed.

    Raises ConfigError if the config has no rewards that can be called, or the run has no such step.
    """
    spec, called, left_out = _callable_rewards(config, flags)
    number, path = existing_run(run).sampled_step(step)
    stored = read_trajectories(path)
    # Each in a group of its own, as a failure ends the scoring of its group.
    columns, failures = _all_values(called, [replace(t, group=i) for i, t in enumerate(stored)])
    scored = [(t, {name: columns[name][i] for name in columns}) for i, t in enumerate(stored)]
    stored_weights = {p.name: p.weight for t in stored[:1] for p in t.rewards}
    models = spec.config.scoring_models
    kept = {  # parts that cannot be called keep the run's values
        name: models[name].weight if name in models else weight
        for name, weight in stored_weights.items()
        if name in spec.config.parts and name not in called
    }
    weights = kept | {name: part.weight for name, part in called.items()}
    notes = [
        *(f"left out: {part}" for part in left_out),
        *(
            f"note: rewards.{name} is normalised in a run; its values now are those before"
            for name, part in called.items()
            if part.normalize
        ),
        *(
            f"note: the run's reward {name} is not in this config"
            for name in stored_weights
            if name not in spec.config.parts
        ),
    ]
    now = [_weighted(response, weights) for response in scored]
    lines = [f"step {number} of {run}: {plural(len(stored), 'response')}", ""]
    lines += [*_table_of_means(scored, now, [*called]), *_table_of_changes(scored, now, shown)]
    return "\n".join([*lines, *([""] if notes else []), *notes]), failures


def _weighted(response: _Scored, weights: Mapping[str, float]) -> float:
    """Return the reward by the new weights, of new values and those of the run that are kept."""
    trajectory, values = response
    kept = {p.name: p.value for p in trajectory.rewards if p.name in weights}
    new = {name: nan if value is None else value for name, value in values.items()}
    return sum(value * weights[name] for name, value in (kept | new).items())


def _table_of_means(
    scored: Sequence[_Scored], now: Sequence[float], called: Sequence[str]
) -> list[str]:
    names = dict.fromkeys((*(p.name for t, _ in scored for p in t.rewards), *called))
    rows = [
        (name, *_compared([(_given(t, name), values.get(name)) for t, values in scored]))
        for name in names
    ]
    in_all = _compared([(t.reward, new) for (t, _), new in zip(scored, now, strict=True)])
    return _align([("reward", "of the run", "now", "changed"), *rows, ("in all", *in_all)], (0,))


def _table_of_changes(scored: Sequence[_Scored], now: Sequence[float], shown: int) -> list[str]:
    """Return a table of the responses whose reward changed most, after an empty line."""
    changes = [
        (inf if isnan(new) or isnan(t.reward) else abs(new - t.reward), t, new)
        for (t, _), new in zip(scored, now, strict=True)
    ]
    changes.sort(key=lambda change: change[0], reverse=True)
    cases = [
        (f"{t.group}.{t.sample_index}", f"{t.reward:.4g}", f"{new:.4g}", _line(t))
        for change, t, new in changes[:shown]
        if change > 0
    ]
    return ["", *_align([("response", "of the run", "now", ""), *cases], (0, 3))] if cases else []


def try_rewards(config: str, flags: Sequence[str], count: int) -> tuple[str, list[str]]:
    """Call a config's rewards on the first `count` rows of its first source.

    Return a table of the values with what stands out, as text; and the first failure of each reward
    that failed.

    Raises ConfigError if the config has no rewards that can be called, or rows cannot be read.
    """
    spec, called, left_out = _callable_rewards(config, flags)
    key, source = next(iter(spec.data.train_sources().items()))
    refuse(check_source(key, source))
    refuse(check_first_columns(key, source, spec.data.on_bad_row))
    refuse(reward_problems(spec))
    responses = [*_responses(_first_prompts(spec, source, count))]
    columns, failures = _all_values(called, [trajectory for *_, trajectory in responses])
    rows = [["row", "response", *columns]]
    for i, (row, kind, trajectory) in enumerate(responses):
        text = " ".join(trajectory.response_text.split())[:_SHOWN]
        values = (column[i] for column in columns.values())
        cells = (_FAILED if value is None else f"{value:.4g}" for value in values)
        rows.append([str(row), f"{kind}: {text}" if text else kind, *cells])
    notes = [f"left out: {part}" for part in left_out]
    for name, column in columns.items():
        if len({*column}) == 1 and column[0] is not None:
            same = f"{column[0]:.4g}"
            notes.append(f"note: rewards.{name} gives all responses the same value, {same}")
    head = f"first rows of {key}; values before weight and normalize"
    lines = [head, "", *_align(rows, left=(0, 1)), *([""] if notes else []), *notes]
    return "\n".join(lines), failures


def _callable_rewards(
    config: str, flags: Sequence[str]
) -> tuple[RunSpec[RlConfig], dict[str, RewardConfig], list[str]]:
    """Return a config's spec, its rewards that can be called here, and why others cannot."""
    spec = load_any(config, flags)
    loaded = spec.config
    if not isinstance(loaded, RlConfig) or not loaded.rewards:
        raise ConfigError(
            f"{config} has no `rewards` to call. Give a config of plimsoll rl; reward models need "
            f"a run, or `plimsoll serve-reward`."
        )
    left_out = [f"{name}, a reward model: it is loaded in a run" for name in loaded.scoring_models]
    called: dict[str, RewardConfig] = {}
    for name, part in loaded.rewards.items():
        if part.name and is_of_episodes(reward_function(part)) and loaded.environments:
            left_out.append(f"rewards.{name}: it reads episodes, which only a run plays")
        else:
            called[name] = part
    if not called:
        raise ConfigError(f"No reward of {config} can be called: {'; '.join(left_out)}.")
    return spec, called, left_out


def _all_values(
    called: Mapping[str, RewardConfig], trajectories: Sequence[Trajectory]
) -> tuple[dict[str, list[float | None]], list[str]]:
    """Return the values of each reward, and the first failure of each that failed."""
    failures: list[str] = []
    return {n: _values(n, part, trajectories, failures) for n, part in called.items()}, failures


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
    none = np.zeros(0, np.int32)
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
    values = {t.group: t.part(name) for t in scored.trajectories}
    return [values.get(t.group) for t in trajectories]
