"""The meaning of a checked config, computed once and used by plan, placement and run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Generic, Literal, get_args

from plimsoll.config.cluster import MAIN_RANKS, ClusterConfig, RankKind, RankSleep
from plimsoll.config.data import DataConfig
from plimsoll.config.engine import FrozenRole, ModelConfig, TrainedRole
from plimsoll.config.rollout import RolloutConfig
from plimsoll.config.run import RunConfig
from plimsoll.resolve.decisions import Decision, decide
from plimsoll.resolve.eval_sets import EvalSet
from plimsoll.resolve.job import ConfigT, Evaluation, Job, Sampling, Workload
from plimsoll.resolve.roles import Role, RoleName

Phase = Literal[
    "precompute", "load", "rollout", "score", "train_critic", "train_actor", "sync", "save"
]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""The phases of a run in their order: those before the first step, then those of a step."""


@dataclass(frozen=True)
class RunSpec(Generic[ConfigT]):
    """A run as its config describes it.

    Attributes:
        job: the job that it does.
        config: the settings, with a value for every `auto`.
        written: the config with its `auto`; used only to make a changed run of it.
        roles: the roles by name, in the order in which they are loaded.
        workload: the size of a step.
        sampling: the work of engines; None if the job learns from data.
        evaluation: the metrics of held-out rows.
        rows: the number of rows to learn from, all sources together; None until they are read.
        decisions: the values that were decided for `auto`.
    """

    job: Job[ConfigT]
    config: ConfigT
    written: ConfigT
    roles: Mapping[RoleName, Role]
    workload: Workload
    sampling: Sampling | None
    evaluation: Evaluation
    rows: int | None = None
    decisions: tuple[Decision, ...] = ()

    @property
    def run(self) -> RunConfig:
        """The settings of the run."""
        return self.config.run

    @property
    def cluster(self) -> ClusterConfig:
        """The settings of the cluster."""
        return self.config.cluster

    @property
    def data(self) -> DataConfig:
        """The settings of the data."""
        return self.config.data

    @property
    def actor(self) -> TrainedRole:
        """The settings of the actor."""
        return self.config.actor

    @property
    def engines(self) -> RolloutConfig | None:
        """The settings of the engines; None if the run starts none.

        A job that learns from data starts none, and neither does a replay.
        """
        rollout = None if self.sampling is None else self.sampling.rollout
        return rollout if rollout is not None and rollout.replay is None else None

    @property
    def rank_sleep(self) -> RankSleep:
        """What ranks move to host memory while engines sample; "none" without engines."""
        return self.cluster.rank_sleep if self.engines is not None else "none"

    @property
    def eval_sets(self) -> tuple[EvalSet, ...]:
        """The sets of held-out prompts; empty if the job learns from data."""
        return () if self.sampling is None else self.sampling.sets

    @property
    def known_steps(self) -> int | None:
        """The number of steps of the run; None if it follows from rows that are not read yet."""
        if self.run.epochs is None or self.rows is None:
            return self.run.steps
        drawn = self.workload.units if self.sampling is None else self.sampling.prompts
        return ceil(self.run.epochs * self.rows / drawn)

    @property
    def steps(self) -> int:
        """The number of steps of the run, once its rows are read."""
        steps = self.known_steps
        assert steps is not None, "asked for before the rows were read"
        return steps

    @cached_property
    def sender(self) -> Role:
        """The role whose weights leave the ranks; a job that trains has one."""
        return next(role for role in self.roles.values() if role.sends)

    def scorer_of(self, part: str) -> Role:
        """Return the role that gives a part of the reward."""
        return next(role for role in self.roles.values() if role.part == part)

    @cached_property
    def trained(self) -> Mapping[RoleName, TrainedRole]:
        """The settings of the roles that learn."""
        return {name: role.trained for name, role in self.roles.items() if role.trained}

    @cached_property
    def frozen(self) -> Mapping[RoleName, FrozenRole]:
        """The settings of the roles that only score and have their own weights."""
        return {name: role.frozen for name, role in self.roles.items() if role.frozen}

    @cached_property
    def models(self) -> Mapping[RoleName, ModelConfig]:
        """The model of every role, without the reference that is the actor without its adapter."""
        return {n: role.model for n, role in self.roles.items() if not role.without_adapter}

    @property
    def may_precompute(self) -> bool:
        """Whether the job has a role that may score all rows before the others are loaded."""
        roles = self.roles.values()
        return self.sampling is None and any(r.compares and r.head == "policy" for r in roles)

    @property
    def actor_scores(self) -> bool:
        """Whether the actor's weights do a forward pass in the phase `score`.

        In RL they do in two cases: a step needs their log-probs from before it learns; or the
        reference is the actor without its adapter.
        """
        if self.sampling is None or any(role.without_adapter for role in self.roles.values()):
            return True
        return self.scores_before_learning

    @property
    def scores_before_learning(self) -> bool:
        """Whether a step of RL computes the actor's log-probs before it learns from them.

        It does if it has several updates, and for a KL of what older weights sampled, from a
        reference or a teacher. In any other step the log-probs of its one update are the same.
        """
        stale = self.sampling is not None and self.sampling.rollout.staleness > 0
        compared = any(role.compares for role in self.roles.values())
        return self.workload.updates > 1 or (stale and compared)

    @property
    def sends_adapter_alone(self) -> bool:
        """Whether the actor's adapter goes to the engines without its base model."""
        engines = self.engines
        return bool(engines and self.actor.adapter and engines.engine.takes_adapter_alone)

    def ranks_of(self, role: RoleName) -> int:
        """Return the number of ranks over which a role is divided."""
        return self.cluster.rank_counts[self.rank_kind_of(role)]

    def shards_of(self, role: RoleName) -> int:
        """Return the number of ranks that share a pack of a role."""
        return self.cluster.shards_of(self.rank_kind_of(role))

    def rank_kind_of(self, role: RoleName) -> RankKind:
        """Return the kind of the ranks that host a role."""
        group = self.roles[role].group
        return group if group in self.cluster.own_ranks else MAIN_RANKS

    @cached_property
    def phases(self) -> frozenset[Phase]:
        """The phases of the run. Evaluation by log-probs counts as scoring."""
        roles = self.roles.values()
        phases: set[Phase] = {"load", *(role.trains for role in roles if role.trains)}
        if self.trained and (self.run.keep_checkpoints or self.run.save_model):
            phases.add("save")
        if self.engines is not None:
            phases |= {"rollout", "sync"} if self.trained else {"rollout"}
        phases |= {role.scoring_phase for role in roles if role.scores}
        if self.sampling is None and self.data.eval is not None:
            phases.add("score")
        return frozenset(phases)

    def longest_sequence(self, *, held_out: bool) -> tuple[int, str]:
        """Return the most tokens of a sequence, and a text of the keys that set them.

        `held_out`: whether responses to held-out prompts count too, which the engines and the model
        that they sample with read.
        """
        longest = self.data.max_tokens
        keys = f"data.max_tokens = {longest}"
        if self.sampling is None:
            return longest, keys
        responses = self.sampling.longest_responses
        if not (held_out or self.sampling.environments):
            responses = dict([*responses.items()][:1])
        keys += "".join(f", {key} = {new}" for key, new in responses.items())
        return longest + max(responses.values()), keys


def resolve(job: Job[ConfigT], config: ConfigT) -> RunSpec[ConfigT]:
    """Return the run that a config of a job describes.

    Raises:
        ConfigError: the config names a loss that cannot be used and on which the roles depend; or
            `decide` raises it.
        PlimsollError: `decide` raises it.
    """
    written = config
    config, decisions = decide(written)
    work = job.workload(config)
    # A pack has a micro-batch of each of the actor's ranks that share it.
    work = replace(work, budget=work.budget * config.cluster.sequence_parallel)
    roles = [replace(role, order=order) for order, role in enumerate(job.roles(config))]
    return RunSpec(
        job,
        config,
        written,
        {role.name: role for role in roles},
        work,
        job.sampling(config),
        job.evaluation(config),
        decisions=decisions,
    )


def resolve_changed(spec: RunSpec[ConfigT], sections: Mapping[str, object]) -> RunSpec[ConfigT]:
    """Return the run with these sections in its config instead; every `auto` is decided anew.

    Raises the errors of `resolve`.
    """
    return resolve(spec.job, spec.written.model_copy(update=sections))
