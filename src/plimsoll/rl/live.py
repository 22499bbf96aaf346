"""Sample trajectories with the run's engines, which have the weights of an earlier step."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.errors import ConfigError
from plimsoll.records import Prompt
from plimsoll.reward.score import Scorer
from plimsoll.rl.ahead import SampledAhead
from plimsoll.rl.answers import Answering
from plimsoll.rl.environments import EnvironmentKinds, set_up
from plimsoll.rl.episodes import Environments
from plimsoll.rl.evaluate import evaluate
from plimsoll.rl.group_journal import GroupJournal
from plimsoll.rl.reward_model import score_by_models
from plimsoll.rl.sampling import Sampled, normalize_rewards, sample
from plimsoll.rl.setup import (
    RlWork,
    first_sync,
    free_memory_for_sync,
    put_ranks_to_sleep,
    wake_ranks,
)
from plimsoll.rl.source import Experience, Source
from plimsoll.run.numbers import plural
from plimsoll.run.state import RunState
from plimsoll.sync.proof import SyncReport, WeightSync, sync_weights


@dataclass(frozen=True)
class Live(Source):
    """A `Source` that samples with engines.

    With a `rollout.staleness` of 0 engines and ranks take turns. Else engines sample further groups
    while the ranks train.

    Attributes:
        work: the open job.
        scorer: scores responses.
        environments: the environments that play episodes; None: each response stands alone.
        sync: sends new weights to the engines.
        ahead: the groups that are sampled while the ranks train; None: they take turns.
    """

    work: RlWork
    scorer: Scorer
    environments: Environments | None
    sync: WeightSync
    ahead: SampledAhead | None

    @classmethod
    def start(cls, work: RlWork, scorer: Scorer, kinds: EnvironmentKinds) -> Live:
        """Return the source, after checking that engines and ranks hold the same weights."""
        environments = set_up(work.spec, kinds, scorer)
        with work.session.phase("sync", work.cluster):
            free_memory_for_sync(work.cluster, work.spec)  # of what loading needed
            sync = first_sync(work.cluster, work.spec, work.data)
            put_ranks_to_sleep(work.cluster, work.spec)
        staleness = work.spec.config.rollout.staleness
        ahead = SampledAhead(work, scorer, environments) if staleness else None
        return cls(work, scorer, environments, sync, ahead)

    def begin(self, state: RunState) -> None:
        """Restore the rewards' statistics, and send a resumed run's weights to the engines.

        Raises ConfigError if prompts wait that an asynchronous run was sampling.
        """
        if state.unlearned and self.work.config.rollout.staleness == 0:
            raise ConfigError(
                f"rollout.staleness is 0, and the checkpoint of step {state.step} has "
                f"{plural(len(state.unlearned), 'prompt')} that were drawn and not learned from. "
                "Only a run that samples while it learns can go on with them. Set "
                "rollout.staleness to 1 or more, or begin a new run.directory."
            )
        self.scorer.restore(state.rewards)
        if self.work.session.resumed:
            self._send(state.weight_version)

    def _send(self, version: int) -> SyncReport:
        """Send the ranks' weights to the engines as `version`; return the proof."""
        with self.work.session.phase("sync", self.work.cluster):
            free_memory_for_sync(self.work.cluster, self.work.spec)
            proved = sync_weights(self.sync, version)
            put_ranks_to_sleep(self.work.cluster, self.work.spec)
        return proved

    def draw(self, state: RunState) -> Experience:
        """Sample and score the trajectories of the step after `state`, and return them."""
        work, cluster = self.work, self.work.cluster
        if self.ahead is None:
            sampled = sample_step(work, self.scorer, self.environments, state)
        else:
            with work.session.phase("rollout", cluster):
                sampled = normalize_rewards(self.ahead.draw(state), self.scorer)
        trajectories, greedy = sampled.trajectories, sampled.greedy
        with work.session.phase("score", cluster):
            if self.ahead is None:
                wake_ranks(cluster, work.spec)  # only now: engines are read awake, as planned
            if work.config.batch.dynamic_sampling is None:  # else each round was scored by itself
                trajectories = score_by_models(trajectories, work.spec, cluster)
            if greedy:
                greedy = score_by_models(greedy, work.spec, cluster)
        baselines = {t.group: t.reward for t in greedy}
        drawn = sampled.prompts, sampled.metrics, sampled.unlearned
        return Experience(trajectories, baselines, *drawn)

    def renew(self, step: int) -> dict[str, float]:
        """Send the ranks' weights to the engines; return the transfer's metrics (`sync/<name>`)."""
        proved = self._send(step)
        if self.ahead is not None:
            self.ahead.renew(step)
        return {
            "sync/logprob_gap": proved.gap,
            "sync/rounding": proved.rounding,
            f"sync/bytes/{proved.route}": proved.bytes,
            f"sync/seconds/{proved.route}": proved.seconds,
        }

    def revive(self, version: int) -> list[str]:
        """Start dead engines again, and give them the ranks' weights, which are of `version`."""
        self.close()
        work = self.work
        with work.session.phase("load", work.cluster):
            free_memory_for_sync(work.cluster, work.spec)
            dead = work.cluster.revive_engines()
        with work.session.phase("sync", work.cluster):
            self.sync.route.renew()
            sync_weights(self.sync, version)
            put_ranks_to_sleep(work.cluster, work.spec)
        return dead

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the figures of the held-out prompts."""
        work, progress = self.work, self.work.session.progress

        def answering_to(key: str) -> Answering:
            submit = progress.count_calls(self.scorer.of_held_out(key).submit)
            journal = GroupJournal(work.session.journal, ("held out", step, key))
            return Answering(
                self.scorer.loop, submit, progress.note, self.environments, key, journal
            )

        with work.session.phase("eval", work.cluster):
            return evaluate(work.cluster, work.spec, work.data.held_out, answering_to)

    def rewards(self) -> dict[str, dict[str, float]]:
        """Return the running statistics of rewards."""
        return self.scorer.state()

    def close(self) -> None:
        """Cancel the groups that are sampled ahead."""
        if self.ahead is not None:
            self.ahead.end()


def sample_step(
    work: RlWork, scorer: Scorer, environments: Environments | None, state: RunState
) -> Sampled:
    """Sample and score the step after `state`; return the trajectories with normalised rewards.

    Reward models do not score them here, unless dynamic sampling needs their scores.
    """

    def draw(first: int, count: int) -> list[Prompt]:
        return work.batch(state.data_position + first, count)

    with work.session.phase("rollout", work.cluster):
        progress = work.session.progress
        answering = Answering(
            scorer.loop,
            progress.count_calls(scorer.submit),
            progress.note,
            environments,
            journal=GroupJournal(work.session.journal, ("request", state.step + 1)),
        )
        sampled = sample(work.cluster, work.spec, draw, state.step + 1, answering)
        return normalize_rewards(sampled, scorer)
