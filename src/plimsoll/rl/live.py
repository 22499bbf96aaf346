"""Trajectories as engines sample them, with the weights of the step before."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from plimsoll.records import Prompt
from plimsoll.reward.score import Scorer
from plimsoll.rl.answers import Answering
from plimsoll.rl.environments import Kinds, set_up
from plimsoll.rl.episodes import Environments
from plimsoll.rl.evaluate import evaluate
from plimsoll.rl.experience import Experience
from plimsoll.rl.reward_model import score_by_models
from plimsoll.rl.sampling import normalized, sample
from plimsoll.rl.setup import RlWork, first_sync, make_room
from plimsoll.rollout.protocol import RolloutEngine
from plimsoll.rollout.sync import WeightSync, sync_weights
from plimsoll.run.state import RunState


@dataclass(frozen=True)
class Live:
    """A `Source` that samples. environments: that go on with what is sampled. sync: the way of new
    weights to the engines."""

    work: RlWork
    scorer: Scorer
    environments: Environments | None
    sync: WeightSync

    @classmethod
    def start(cls, work: RlWork, scorer: Scorer, kinds: Kinds) -> Live:
        """Engines that are seen to have the weights that the ranks have loaded."""
        environments = set_up(work.spec, kinds, scorer)
        with work.session.phase("sync", work.cluster):
            make_room(work.cluster, work.spec)  # of what loading needed
            sync = first_sync(work.cluster, work.spec, work.data)
        return cls(work, scorer, environments, sync)

    def begin(self, state: RunState) -> None:
        session = self.work.session
        self.scorer.restore(state.rewards)
        if session.resumed:
            with session.phase("sync", self.work.cluster):
                make_room(self.work.cluster, self.work.spec)
                sync_weights(self.sync, state.weight_version)

    def draw(self, state: RunState) -> Experience:
        work, cluster = self.work, self.work.cluster
        progress = work.session.progress
        with work.session.phase("rollout", cluster):
            submit = progress.count_calls(self.scorer.submit)
            answering = Answering(submit, progress.note, self.environments)
            drawn = partial(drawn_prompts, work, state)
            found = sample(cluster, work.spec, drawn, state.step + 1, answering)
            found = normalized(found, self.scorer)
        trajectories, greedy = found.trajectories, found.greedy
        with work.session.phase("score", cluster):
            cluster.engines_do(RolloutEngine.sleep)  # only now: they are read awake, as planned
            if work.config.batch.dynamic_sampling is None:  # else each round was scored by itself
                trajectories = score_by_models(trajectories, work.spec, cluster)
            if greedy:
                greedy = score_by_models(greedy, work.spec, cluster)
        return Experience(trajectories, greedy, found.prompts, found.metrics)

    def renew(self, step: int) -> dict[str, float]:
        with self.work.session.phase("sync", self.work.cluster):
            make_room(self.work.cluster, self.work.spec)
            proved = sync_weights(self.sync, step)
        return {
            "sync/logprob_gap": proved.gap,
            "sync/bytes": proved.bytes,
            "sync/seconds": proved.seconds,
        }

    def evaluate(self) -> dict[str, float]:
        work, progress = self.work, self.work.session.progress

        def answering_to(key: str) -> Answering:
            submit = progress.count_calls(self.scorer.of_held_out(key).submit)
            return Answering(submit, progress.note, self.environments, key)

        with work.session.phase("eval", work.cluster):
            return evaluate(work.cluster, work.spec, work.data.held_out, answering_to)

    def rewards(self) -> dict[str, dict[str, float]]:
        return self.scorer.state()


def drawn_prompts(work: RlWork, state: RunState, first: int, count: int) -> list[Prompt]:
    """Prompts of the step that follows, from the first on."""
    return work.batch(state.data_position + first, count)
