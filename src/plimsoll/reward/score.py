"""From the config's rewards to a function that scores a trajectory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import SupportsFloat

from plimsoll.algorithm.failure import failure
from plimsoll.config.choice import resolve_choice
from plimsoll.config.reward import RewardConfig
from plimsoll.errors import ConfigError, DataError, PlimsollError
from plimsoll.machine.host import usable_cores
from plimsoll.records import RewardPart, Trajectory
from plimsoll.reward.references import Check, is_answered_at_once, reference_check

_SHOWN_CHARACTERS = 200
_LEAST_PER_THREAD = 32  # a process for fewer takes longer to start than it saves


@dataclass(frozen=True)
class _Rule:
    """choice: what the config says the function is, such as `my_rewards:short`. check: what it
    brings to look at references, if anything. at_once: whether several threads may call it."""

    name: str
    choice: str
    weight: float
    function: Callable[[Trajectory], object]
    check: Check | None
    at_once: bool


@dataclass(frozen=True)
class Scorer:
    """Gives trajectories their reward parts, in the order of the config. source: of their prompts,
    as the config calls it."""

    rules: tuple[_Rule, ...]
    source: str = "data.train"

    def of_held_out(self) -> Scorer:
        """The same for prompts of `data.eval`."""
        return replace(self, source="data.eval")

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """New trajectories with the parts. Rules that may be called at once are, by threads; the
        others one after another.

        Raises PlimsollError, naming rule, row, prompt and response, where a rule fails or gives
        something else than a finite number.
        """
        threads = min(usable_cores(), len(trajectories) // _LEAST_PER_THREAD)
        pool = ThreadPoolExecutor(max(1, threads))
        try:
            asked = [
                (t, [(rule, _ask(rule, t, pool)) for rule in self.rules]) for t in trajectories
            ]
            return [
                replace(t, rewards=tuple(_part(*call, t, self.source) for call in calls))
                for t, calls in asked
            ]
        finally:
            pool.shutdown(cancel_futures=True)

    def check_reference(self, reference: str) -> None:
        """Have every rule that compares with references look at one, before anything is sampled.

        Raises DataError, naming the rule, where it cannot be compared with, and PlimsollError where
        the check itself fails.
        """
        for rule in self.rules:
            if rule.check is not None:
                _check(rule, rule.check, reference)


def build_rewards(rewards: Mapping[str, RewardConfig]) -> Scorer:
    """The scorer of a config's `rewards`.

    Raises ConfigError where a rule or an option cannot be used.
    """
    return Scorer(tuple(_rule(name, config) for name, config in rewards.items()))


def _rule(name: str, config: RewardConfig) -> _Rule:
    try:
        function = resolve_choice(config, "plimsoll.reward", "reward")
    except ConfigError as error:
        raise ConfigError(f"rewards.{name}: {error}") from error
    check, at_once = reference_check(function), is_answered_at_once(function)
    return _Rule(name, config.name, config.weight, function, check, at_once)


def _check(rule: _Rule, check: Check, reference: str) -> None:
    try:
        check(reference)
    except ValueError as error:
        raise DataError(f"is no reference for the reward {rule.name!r}: {error}") from error
    except PlimsollError:
        raise
    except Exception as error:
        where = f"The check of references of the {_named(rule)}"
        raise failure(where, error, f"The reference{_cut(reference)}.") from error


def _ask(rule: _Rule, trajectory: Trajectory, pool: ThreadPoolExecutor) -> Callable[[], object]:
    """What gives the rule's value: when called, or already at work on it."""
    if rule.at_once:
        return pool.submit(rule.function, trajectory).result
    return partial(rule.function, trajectory)


def _part(
    rule: _Rule, ask: Callable[[], object], trajectory: Trajectory, source: str
) -> RewardPart:
    where = _where(rule, trajectory, source)
    try:
        value = ask()
    except PlimsollError as error:
        raise type(error)(f"{where}: {error}") from error
    except KeyboardInterrupt:  # Ctrl-C
        raise
    except BaseException as error:  # own code may do anything, and the row must be known
        raise failure(where, error, _shown(trajectory)) from error
    number = _finite(value)
    if number is None:
        raise PlimsollError(
            f"{where} gave {_repr(value)} ({type(value).__name__}), and a reward must be a finite "
            f"number. {_shown(trajectory)}"
        )
    return RewardPart(rule.name, number, rule.weight)


def _finite(value: object) -> float | None:
    """A number of Python's, NumPy's or torch's; None for anything else, and for NaN or infinity."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # many numbers; or one too large
        return None
    return number if math.isfinite(number) else None


def _repr(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of over 4,300 digits
        text = object.__repr__(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _where(rule: _Rule, trajectory: Trajectory, source: str) -> str:
    row = f"row {trajectory.prompt.index} (from 0) of {source}"
    return f"The {_named(rule)}, at {row}"


def _named(rule: _Rule) -> str:
    own = f" ({rule.choice})" if ":" in rule.choice else ""
    return f"reward {rule.name!r}{own}"


def _shown(trajectory: Trajectory) -> str:
    texts = {"prompt": trajectory.prompt.text, "response": trajectory.response_text}
    return " ".join(f"The {name}{_cut(text)}." for name, text in texts.items())


def _cut(text: str) -> str:
    cut = " (cut)" if len(text) > _SHOWN_CHARACTERS else ""
    return f"{cut}: {text[:_SHOWN_CHARACTERS]!r}"
