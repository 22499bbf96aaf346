"""Decorators that declare what a reward needs, and checks and prices that use these declarations.

A reward can declare how it checks references, how it takes answers from responses, and what it
needs of the machine. Its check is called for every reference while the rows are read; a row whose
reference no answer could equal is a bad row. The memory of the processes that rewards start on the
training loop's host is estimated from what they declare.
"""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import xxhash

from plimsoll.config.base import Choice
from plimsoll.config.data import SourceConfig
from plimsoll.config.files import nearest
from plimsoll.config.problems import Code, Problem, Section, invalid
from plimsoll.config.reward import RewardConfig
from plimsoll.config.rollout import EnvironmentConfig
from plimsoll.config.run import BestConfig
from plimsoll.config.secrets import mask_setting
from plimsoll.data.fields import kind_of, reference_text
from plimsoll.errors import ConfigError
from plimsoll.process.child import processes_at_once
from plimsoll.process.patterns import PROCESS_BYTES
from plimsoll.resolve.choices import unusable
from plimsoll.resolve.eval_sets import EvalSet
from plimsoll.reward.adapters import named_adapter, reward_function
from plimsoll.timeline.items import Item

Check = Callable[[object], object]
"""Takes a reference as its row has it; raises ValueError, saying what is wrong, if it is bad."""

Same = Callable[[str, str], bool]
"""Takes two answers; returns whether they count as the same answer in a vote."""

_NONE: Mapping[str, EnvironmentConfig] = MappingProxyType({})
_SETTINGS: Code = "reward-settings"
_ATTRIBUTE = "check_reference"
_VOTING = "voting"
_LIBRARIES = ("math-verify", "sympy")
_PROCESSES = "helper_processes"
_MACHINE = "needs_machine"
_EPISODES = "reads_episodes"
_COLUMNS = "takes_columns"
_Reward = TypeVar("_Reward", bound=Callable[..., Any])


def checks_references(
    check: Callable[..., object], *, unless: str | None = None, whole: bool = False
) -> Callable[[_Reward], _Reward]:
    """Return a decorator that marks a reward which needs references, checked before a run.

    Args:
        check: Takes a reference, and by keyword the reward's options that it has parameters for.
            Raises ValueError, saying what is wrong with the reference and what to write instead.
        unless: The name of an option; if a config sets it, the reward needs no references.
        whole: True if the reward and `check` take the reference unchanged, as its row has it.
            False if they take text: then a bool, a list or an object is refused.
    """
    return _mark(_ATTRIBUTE, (check if whole else _text_check(check), unless))


def _text_check(check: Callable[..., object]) -> Callable[..., object]:
    @wraps(check)
    def check_text(reference: object, **options: Any) -> object:
        if isinstance(reference, bool | list | dict):
            raise ValueError(
                f"it is {kind_of(reference)}, and this reward compares with text. Name a column of "
                f"text or numbers (`a.b` is b within the objects of a), or take a reward that gets "
                f"it as it is, such as `verl_function`"
            )
        return check(reference_text(reference), **options)

    return check_text


def needs_machine(missing: Callable[..., str], fix: str) -> Callable[[_Reward], _Reward]:
    """Return a decorator that marks a reward which cannot run on every machine.

    The machine is checked before a run.

    Args:
        missing: Takes by keyword the reward's options that it has parameters for. Returns
            sentences that say what is missing on this machine, or "".
        fix: What to do if something is missing.
    """
    return _mark(_MACHINE, (missing, fix))


def asks_processes(bytes_each: int, source: str) -> Callable[[_Reward], _Reward]:
    """Return a decorator that marks a reward which waits for a helper process in each call.

    Several threads may call such a reward at once.

    Args:
        bytes_each: Resident memory of one process.
        source: Where this number comes from.
    """
    return _mark(_PROCESSES, (bytes_each, source))


def reads_episodes(environments: bool) -> Callable[[_Reward], _Reward]:
    """Return a decorator that marks a reward which needs objects of the episode.

    The objects exist only in the process that played the episode.

    Args:
        environments: True if the reward needs the environments; False for the conversations only.
    """
    return _mark(_EPISODES, environments)


def takes_columns(names: Collection[str]) -> Callable[[_Reward], _Reward]:
    """Return a decorator that marks a reward which cannot be called without these columns."""
    return _mark(_COLUMNS, tuple(names))


def is_of_episodes(reward: partial[Any]) -> bool:
    """Return whether a reward needs objects of the episode; see `reads_episodes`."""
    return getattr(reward.func, _EPISODES, None) is not None


@dataclass(frozen=True)
class Voting:
    """The functions with which votes take answers from responses and compare them.

    Attributes:
        take: Takes a response's text; returns the answer in it, or None.
        same: Takes two answers; returns whether they count as the same answer in a vote.
    """

    take: Callable[..., str | None]
    same: Same


def gives_answers(
    answer: Callable[..., str | None], same: Same = operator.eq
) -> Callable[[_Reward], _Reward]:
    """Return a decorator that marks a reward which judges an answer in the response.

    With it, votes for equal answers can be counted.

    Args:
        answer: Takes a response's text, and by keyword the reward's options that it has
            parameters for. Returns the answer, or None if there is none.
        same: Takes two answers; returns whether they count as equal. Default: equal texts.
    """
    return _mark(_VOTING, Voting(answer, same))


def _mark(attribute: str, value: object) -> Callable[[_Reward], _Reward]:
    def mark(reward: _Reward) -> _Reward:
        setattr(reward, attribute, value)
        return reward

    return mark


def helper_process(reward: partial[Any]) -> tuple[int, str] | None:
    """Return what `asks_processes` declares of a reward's helper processes, or None."""
    process: tuple[int, str] | None = getattr(reward.func, _PROCESSES, None)
    return process


def reference_check(reward: partial[Any]) -> Check | None:
    """Return a reward's check of references with its options bound; None if it needs none."""
    check, unless = getattr(reward.func, _ATTRIBUTE, (None, None))
    return None if check is None or unless in reward.keywords else _with_options(check, reward)


def describe_check(check: Check) -> list[str]:
    """Return what tells a check of references from others: its name, options and source files.

    The files of Plimsoll's own checks are all of this package; they use two libraries.
    """
    function = inspect.unwrap(getattr(check, "func", check))
    name = f"{function.__module__}.{getattr(function, '__qualname__', function)}"
    options = repr(sorted(getattr(check, "keywords", {}).items()))
    with suppress(TypeError, OSError):  # no function of Python, or its file is gone
        file = Path(inspect.getsourcefile(function) or "")
        is_own = file.parent == Path(__file__).parent
        files = sorted(file.parent.glob("*.py")) if is_own else [file]
        code = b"".join(path.read_bytes() for path in files)
        libraries = [version(library) for library in _LIBRARIES] if is_own else []
        return [name, options, xxhash.xxh3_128_hexdigest(code), *libraries]
    return [name, options]


def voting_of(rewards: Mapping[str, Choice], part: str) -> Voting | None:
    """Return the `Voting` of the reward named `part`, with its options bound.

    None if that reward judges no answer: servers, a judge, a reward model, or a function that is
    not marked by `gives_answers`.
    """
    choice = rewards.get(part)
    reward = reward_function(choice) if choice is not None and choice.name else None
    voting: Voting | None = getattr(reward.func, _VOTING, None) if reward else None
    if reward is None or voting is None:
        return None
    return replace(voting, take=_with_options(voting.take, reward))


def _with_options(function: Callable[..., Any], reward: partial[Any]) -> partial[Any]:
    """Return a function with the reward's options bound for which it has parameters."""
    named = inspect.signature(function).parameters
    return partial(function, **{name: v for name, v in reward.keywords.items() if name in named})


def _missing_keys(name: str, part: RewardConfig) -> Iterator[Problem]:
    """Yield a problem if the environment variable of a judge's or servers' key is not set here."""
    asked_servers = ("judge", part.judge, "judge's key"), ("http", part.http, "servers' token")
    for section, asked, what in asked_servers:
        if asked is not None and asked.api_key is not None and not os.environ.get(asked.api_key):
            why = f"It names the environment variable of the {what}, which is not set here."
            key, shown = f"rewards.{name}.{section}.api_key", mask_setting(asked.api_key)
            yield invalid(key, shown, why, "set the variable, or leave it out")


def check_rewards(
    rewards: Mapping[str, Choice], environments: Mapping[str, EnvironmentConfig] = _NONE
) -> Iterator[Problem]:
    """Yield a problem for each reward that cannot be used here, or not with these environments."""
    for name, part in rewards.items():
        if isinstance(part, RewardConfig):
            yield from _missing_keys(name, part)
        if not part.name:  # servers, or a judge
            continue
        try:
            reward = reward_function(part)
        except ConfigError as error:
            yield unusable(f"rewards.{name}", part, error)
        else:
            missing, fix = getattr(reward.func, _MACHINE, (None, ""))
            if missing is not None and (why := _with_options(missing, reward)()):
                yield invalid(f"rewards.{name}", part.name, why, fix, code="package-missing")
            yield from _of_episodes(f"rewards.{name}", part, reward, environments)


def _of_episodes(
    key: str, part: Choice, reward: partial[Any], environments: Mapping[str, EnvironmentConfig]
) -> Iterator[Problem]:
    """Yield a problem for each reason why a reward cannot get the episode objects that it needs.

    `reads_episodes` declares these needs.
    """
    at, needs_objects = Section(key, part), getattr(reward.func, _EPISODES, None)
    if needs_objects and not environments:
        why = "It takes environments, and the config has none."
        fix = "a function without environments, or an entry below `environments`"
        yield at.conflict("name", why, fix, _SETTINGS)
    process = isinstance(part, RewardConfig) and part.process
    if needs_objects is not None and environments and process:
        why = "It reads episodes, so it is called in the process that plays them."
        yield at.conflict("process", why, f"{key}.process: false", _SETTINGS)
    for name, environment in environments.items() if needs_objects else ():
        if environment.process:
            why = f"It takes environments, and those of environments.{name} are in processes of "
            why += "their own."
            fix = f"environments.{name}.process: false, or get_reward of the environment"
            yield at.conflict("name", why, fix, _SETTINGS)


def check_votes(
    rewards: Mapping[str, Choice], sets: Iterable[EvalSet], best: BestConfig | None
) -> Iterator[Problem]:
    """Yield a problem if `run.best` is chosen by votes, but the reward judges no answers."""
    if best is None or "maj@" not in best.metric:
        return
    chosen = [set_ for set_ in sets if best.metric.startswith(f"eval/{set_.prefix}")]
    for set_ in chosen:
        if set_.votes and set_.pass_by is not None and voting_of(rewards, set_.pass_by) is None:
            why = f"maj@k counts equal answers, and rewards.{set_.pass_by} takes none from a "
            why += "response."
            fix = f"another figure, or {set_.key}.pass_by: a part that judges an answer"
            yield Section("run.best", best).invalid("metric", why, fix, "best-metric")


def check_columns(
    rewards: Mapping[str, Choice], columns: Mapping[str, Collection[str]]
) -> Iterator[Problem]:
    """Yield a problem for each reward that takes a column which a source's rows lack.

    `columns` has the columns of the sources whose columns are known, by their keys in the config.
    """
    for name, part in rewards.items():
        taken = getattr(reward_function(part).func, _COLUMNS, ()) if part.name else ()
        for key, known in columns.items():
            if missing := [column for column in taken if column not in known]:
                why = f"It takes {' and '.join(map(repr, missing))}, and the rows of {key} have no "
                why += f"such column; they have {', '.join(known)}."
                fix = f"give the parameter a default{nearest(missing[0], known)}"
                yield Section(f"rewards.{name}", part).invalid("name", why, fix, _SETTINGS)


def check_references(
    rewards: Mapping[str, Choice], sources: Mapping[str, SourceConfig]
) -> Iterator[Problem]:
    """Yield a problem for each source without the references that a reward needs.

    `sources` has the sources by their keys in the config.
    """
    chosen = {name: reward_function(part) for name, part in rewards.items() if part.name}
    comparing = [name for name, reward in chosen.items() if reference_check(reward) is not None]
    for key, source in sources.items():
        if comparing and source.reference is None:
            parts = " and ".join(f"rewards.{name}" for name in comparing)
            why = f"There is no column of reference answers, and {parts} would compare with them."
            instead = f"{key}.reference: COLUMN, or other rewards"
            yield invalid(f"{key}.reference", None, why, instead, code="data-columns")


_MIB = 2**20
_OWN_PROCESS = 51 * _MIB
_SOURCE = "measured: Linux, Python 3.11, with NumPy 2 and psutil, 52.9 MB resident"


def process_items(rewards: Mapping[str, Choice], cores: int | None) -> Iterator[Item]:
    """Yield a memory item for each reward's processes, and for the helper processes it waits for.

    The memory of a user's function and of a policy's programs is not counted. `cores` is the
    number of the machine's cores; None if unknown.
    """
    for name, part in rewards.items():
        if not isinstance(part, RewardConfig):
            continue
        if part.judge is not None:
            count = processes_at_once(cores)
            matching = f"processes that match rewards.{name}'s pattern"
            yield processes_item(matching, count, PROCESS_BYTES, _SOURCE)
        if not part.name:
            continue
        count = part.at_once or processes_at_once(cores)
        if part.process:
            yield processes_item(f"processes of rewards.{name}", count, _OWN_PROCESS, _SOURCE)
        if ":" not in part.name and named_adapter(part.name) is None:
            with suppress(ConfigError):  # which is refused elsewhere
                if (helper := helper_process(reward_function(part))) is not None:
                    yield processes_item(f"processes that rewards.{name} asks", count, *helper)


def processes_item(name: str, count: int, each: int, source: str) -> Item:
    """Return the memory item of `count` processes of `each` bytes, on the training loop's host."""
    words = f"{each:,} bytes a process" + (f" x {count} processes" if count > 1 else "")
    return Item("process", "processes", name, "host", "process", count * each, words, source)
