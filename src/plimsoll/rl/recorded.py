"""Learn from what was sampled before a run was killed, instead of sampling it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll.reward.score import Scorer
from plimsoll.rl.experience import Experience, Source
from plimsoll.rl.setup import RlWork, turn_to_ranks
from plimsoll.run.numbers import plural
from plimsoll.run.state import RunState
from plimsoll.run.trajectories import StepDraw, read_draw, read_trajectories
from plimsoll.train.session import lineage_of


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
        turn_to_ranks(self.work.cluster, self.work.spec)
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
