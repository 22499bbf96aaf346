"""Where the training loop gets the scored trajectories of a step from.

`Recorded` reads what was sampled before a run was killed. `Revived` starts dead engines again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from plimsoll.errors import EngineDied
from plimsoll.records import Trajectory
from plimsoll.reward.score import Scorer
from plimsoll.rl.setup import RlWork, wake_ranks
from plimsoll.run.numbers import plural
from plimsoll.run.phases import count_of, recent
from plimsoll.run.state import RunState
from plimsoll.run.trajectories import StepDraw, read_draw, read_trajectories
from plimsoll.train.session import lineage_of


@dataclass(frozen=True)
class Experience:
    """The scored trajectories that a step learns from.

    Attributes:
        trajectories: the trajectories, group by group, with all parts of their rewards.
        baselines: the reward of the greedy response to each group's prompt; empty if the advantage
            needs none.
        prompts: the number of prompts that the step drew from the data.
        metrics: metrics of the sampling, by name.
        unlearned: see `RunState`.
    """

    trajectories: list[Trajectory]
    baselines: Mapping[int, float]
    prompts: int
    metrics: Mapping[str, float]
    unlearned: tuple[int, ...] = ()


class Source(Protocol):
    """A source of trajectories: engines that sample (live.py), or a stored run.

    The methods that have a body here are right for a run without engines.
    """

    def begin(self, state: RunState) -> None:
        """Get ready to continue after `state`; the ranks have loaded the weights of that state."""

    def draw(self, state: RunState) -> Experience:
        """Return the trajectories of the step after `state`."""
        ...

    def renew(self, step: int) -> Mapping[str, float]:
        """Take over the ranks' weights after a step; return metrics of the transfer by name."""
        return {}

    def revive(self, version: int) -> list[str]:
        """Start dead engines again with the ranks' weights; return the names of the dead."""
        return []

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Return the figures of held-out prompts after a step; refused without engines."""
        return {}

    def rewards(self) -> Mapping[str, Mapping[str, float]]:
        """Return the running statistics of rewards, as `RunState` keeps them."""
        return {}

    def close(self) -> None:
        """End what goes on beside the steps."""


@dataclass(frozen=True)
class Recorded(Source):
    """A `Source` that reads the steps which were sampled before, and asks another for the rest.

    The trajectories of a step are in a file before anything learns from them. A run that resumes
    from an earlier checkpoint finds the files of the steps after it. The weights that sampled them
    are those that it has at these steps, since it learns the same from the same trajectories.

    Attributes:
        work: the open job.
        scorer: the scorer, whose running statistics of rewards are restored with each step.
        source: the source of all steps that no file holds.
    """

    work: RlWork
    scorer: Scorer
    source: Source

    def begin(self, state: RunState) -> None:
        """Begin the other source, and remove files of steps that cannot be learned from again."""
        self.source.begin(state)
        step = state.step
        while self._draw_of(step + 1) is not None:
            step += 1
        self.work.session.directory.remove_trajectories_after(step)
        if step > state.step:
            self.work.session.progress.note(
                f"{plural(step - state.step, 'step')} after step {state.step} learn from "
                "trajectories/, which were sampled before the run ended; to sample anew, remove "
                "these files"
            )

    def draw(self, state: RunState) -> Experience:
        """Return the trajectories of the step after `state`, from its file if there is one."""
        draw = self._draw_of(state.step + 1)
        if draw is None:
            return self.source.draw(state)
        wake_ranks(self.work.cluster, self.work.spec)
        with self.work.session.phase("score", self.work.cluster):
            path = self.work.session.directory.trajectories_path(state.step + 1)
            trajectories = read_trajectories(path)
            self.scorer.restore(draw.rewards)
        return Experience(trajectories, draw.baselines, draw.prompts, draw.metrics, draw.unlearned)

    def _draw_of(self, step: int) -> StepDraw | None:
        path = self.work.session.directory.trajectories_path(step)
        draw = read_draw(path) if path.is_file() else None
        return draw if draw is not None and draw.lineage == lineage_of(self.work.spec) else None

    def renew(self, step: int) -> Mapping[str, float]:
        """Take over the ranks' weights after a step."""
        return self.source.renew(step)

    def revive(self, version: int) -> list[str]:
        """Start dead engines again with the ranks' weights."""
        return self.source.revive(version)

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Return the figures of held-out prompts; those of the journal if it has them."""
        journal, key = self.work.session.journal, ("figures", step)
        figures = journal.figures(key)
        if figures is None:
            figures = dict(self.source.evaluate(step))
            journal.add_figures(key, figures)
        return figures

    def rewards(self) -> Mapping[str, Mapping[str, float]]:
        """Return the running statistics of rewards."""
        return self.source.rewards()

    def close(self) -> None:
        """End what the other source does beside the steps."""
        self.source.close()


R = TypeVar("R")


class Revived(Source):
    """A `Source` that starts dead engines again, at most `run.restarts` times in an hour.

    The engine gets the ranks' weights, with the proof of every sync. The call in which it died is
    made once more: responses that were scored come from the journal, the others are sampled with
    the same seeds.
    """

    def __init__(self, work: RlWork, source: Source) -> None:
        self._work, self._source = work, source
        if work.spec.run.restarts:
            work.cluster.let_engines_die()
        self._deaths: list[float] = []

    def begin(self, state: RunState) -> None:
        """Get ready to continue after `state`."""
        self._last(lambda: self._source.begin(state), state.weight_version)

    def draw(self, state: RunState) -> Experience:
        """Return the trajectories of the step after `state`."""
        return self._last(lambda: self._source.draw(state), state.weight_version)

    def renew(self, step: int) -> Mapping[str, float]:
        """Take over the ranks' weights after a step."""
        return self._last(lambda: self._source.renew(step), step)

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Return the figures of held-out prompts after a step."""
        return self._last(lambda: self._source.evaluate(step), step)

    def rewards(self) -> Mapping[str, Mapping[str, float]]:
        """Return the running statistics of rewards."""
        return self._source.rewards()

    def close(self) -> None:
        """End what goes on beside the steps."""
        self._source.close()

    def _last(self, call: Callable[[], R], version: int) -> R:
        """Return the result of a call, which is made again after each death of an engine."""
        has_failed = False
        while True:
            try:
                if has_failed:
                    self._source.revive(version)
                return call()
            except EngineDied as error:
                self._note(error)
                has_failed = True

    def _note(self, error: EngineDied) -> None:
        most = self._work.spec.run.restarts
        self._deaths.append(time.monotonic())
        if recent(self._deaths) > most:
            raise error
        session, count = self._work.session, count_of(self._deaths, most, "engines")
        session.progress.note(f"{error}\n  The engine is started again ({count})")
        first_line = str(error).partition("\n")[0]
        session.sink.notify(
            f"step {session.step_under_way}: {first_line}. It is started again ({count})"
        )
