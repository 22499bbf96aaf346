"""Send the actor's weights from its ranks to the engines, in any cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.rollout import RolloutConfig, SamplingConfig
from plimsoll.data.packing import pack
from plimsoll.errors import EngineDied, WeightSyncError
from plimsoll.model.disturbance import UNSCALED, Disturbance
from plimsoll.records import Floats, Ints, Prompt, Sample, Trajectory, from_packed
from plimsoll.resolve.roles import RoleName
from plimsoll.sampler.protocol import Request, RolloutEngine
from plimsoll.sync.channel import Channel
from plimsoll.sync.proof import Rehearsal
from plimsoll.trainer.weights import WeightPlan
from plimsoll.trainer.worker import Worker

_TAKE_ADAPTER: Callable[..., int] = RolloutEngine.take_adapter  # type: ignore[assignment]
"""The method as the cluster calls it: it awaits its result."""
_ANSWER_TOKENS = 4
"""Tokens of an answer by which the proof sees what engines sample with."""


class ActorRoute:
    """A `WeightRoute` for the actor.

    Args:
        cluster: the cluster.
        role: the role whose weights are sent.
        largest_pack: the most tokens of a pack.
        rollout: the settings of the engines.
        all_first: whether the first transfer sends what training does not change, too, because
            engines have loaded other values.
    """

    def __init__(
        self,
        cluster: Cluster,
        role: RoleName,
        largest_pack: int,
        rollout: RolloutConfig,
        *,
        all_first: bool = False,
    ) -> None:
        self._cluster, self.role = cluster, role
        self._largest = largest_pack
        self._rollout = rollout
        self.name = rollout.sync.decided_route
        self._all = all_first
        self._channels: tuple[Channel, ...] = ()
        self._plans: dict[object, WeightPlan] = {}

    def transfer(self, bucket_bytes: int, version: int, rehearsal: Rehearsal | None = None) -> int:
        """Send the weights that the engines lack, by buckets; return the bytes that one receives.

        Engines that sleep without their weights get all; others get what training changes; in a
        rehearsal all get its layers. Engines that sample beside training pause meanwhile. If an
        engine dies, the ranks and the other engines are freed from waiting for it.
        """
        try:
            return self._transfer(bucket_bytes, version, rehearsal)
        except (EngineDied, WeightSyncError):
            self._cluster.all_beside(Worker.break_off)
            raise

    def _transfer(self, bucket_bytes: int, version: int, rehearsal: Rehearsal | None) -> int:
        cluster, published = self._cluster, self._rollout.engine.as_published
        samples_beside = self._rollout.staleness > 0
        if samples_beside:
            cluster.engines_do(RolloutEngine.pause)
        only_trained = not (self._all or self._rollout.engine.forgets_weights)
        plan, scaled = self._plan(bucket_bytes, only_trained, None), UNSCALED
        largest = plan.largest
        if rehearsal is not None:  # its layers may fill a bucket better
            plan = self._plan(bucket_bytes, only_trained, rehearsal.layers)
            scaled = rehearsal.scaled
        channels = self._open(max(largest, plan.largest))
        cluster.engines_do(RolloutEngine.begin_sync, plan.names, channels)
        each = [(self.role, bucket, published, scaled) for bucket in plan.buckets]
        cluster.stream(Worker.weight_bucket, each, RolloutEngine.receive)
        cluster.engines_do(RolloutEngine.end_receiving)
        cluster.all(Worker.rest_channel)  # before the engines' caches come back to the cards
        cluster.engines_do(RolloutEngine.finish_sync, version)
        if samples_beside:
            cluster.engines_do(RolloutEngine.resume)
        if rehearsal is None:
            self._all = False
        return sum(plan.sizes)

    def rehearsals(self) -> tuple[Rehearsal, ...]:
        """Return what is sent before the run, to see that engines use what they get."""
        return self._cluster.first(Worker.rehearsals, self.role)

    def renew(self) -> None:
        """Open the way anew with the next transfer, and send all: an engine was started again."""
        self._channels, self._all = (), True

    def _plan(
        self, bucket_bytes: int, only_trained: bool, layers: tuple[str, ...] | None
    ) -> WeightPlan:
        """Return the plan of a transfer, which is made once."""
        published = self._rollout.engine.as_published
        asked = bucket_bytes, published, only_trained, layers
        if asked not in self._plans:
            self._plans[asked] = self._cluster.first(Worker.weight_plan, self.role, *asked)
        return self._plans[asked]

    def _open(self, largest: int) -> tuple[Channel, ...]:
        """Return the way of each rank that sends, for buckets of up to so many bytes."""
        if not self._channels or self._channels[0].largest < largest:
            near, by_card = self._cluster.engines_near, self.name == "ipc"
            cards = self._cluster.engines_do(RolloutEngine.cards) if by_card else ()
            arguments = self.name, largest, near, self._rollout.all_parts, [*chain(*cards)]
            self._channels = (*filter(None, self._cluster.all(Worker.open_channel, *arguments)),)
            if not self._channels:
                raise WeightSyncError("no training rank is on a card that an engine uses")
        return self._channels

    def trainer_log_probs(
        self, sequences: Sequence[Ints], disturbance: Disturbance | None = None
    ) -> list[Floats]:
        """Return the trainer's log-probs of all tokens but the first, one array per sequence."""
        samples = [Sample(tokens, np.arange(len(tokens)) > 0) for tokens in sequences]
        packs = pack(samples, self._cluster.streams, max(self._largest, *map(len, sequences)))
        rank_log_probs = self._cluster.call(
            Worker.probe_log_probs, [(self.role, rank_packs, disturbance) for rank_packs in packs]
        ).result()
        return from_packed(chain(*packs), chain(*rank_log_probs))

    def engine_log_probs(self, sequences: Sequence[Ints]) -> list[list[Floats]]:
        """Return the log-probs of each engine, as `trainer_log_probs` returns the trainer's."""
        return self._cluster.engines_do(RolloutEngine.log_probs, tuple(sequences))

    def engine_answers(self, prompts: Sequence[Ints]) -> list[list[Trajectory]]:
        """Return a short answer to each prompt, sampled at temperature 1 by each engine."""
        tokens = min(_ANSWER_TOKENS, self._rollout.sampling.max_new_tokens)
        sampling = SamplingConfig(max_new_tokens=tokens)
        asked = tuple(Prompt(i, prompt, "") for i, prompt in enumerate(prompts))
        request = Request(asked, 1, sampling, seed=0)
        return self._cluster.engines_do(RolloutEngine.generate, request)


class AdapterRoute:
    """A `WeightRoute` for the actor's adapter alone: the engines hold the base model already."""

    name = "adapter"

    def __init__(self, cluster: Cluster, actor: ActorRoute) -> None:
        self._cluster, self._role = cluster, actor.role
        self.trainer_log_probs = actor.trainer_log_probs
        self.engine_log_probs = actor.engine_log_probs
        self.engine_answers = actor.engine_answers

    def rehearsals(self) -> tuple[Rehearsal, ...]:
        """Return (): the engines' own weights stay."""
        return ()

    def renew(self) -> None:
        """Do nothing: each transfer sends the whole adapter."""

    def transfer(self, bucket_bytes: int, version: int, rehearsal: Rehearsal | None = None) -> int:
        """Send the adapter; return the bytes that one engine received. Only `version` is used."""
        return self._cluster.hand_over(Worker.adapter_files, (self._role, version), _TAKE_ADAPTER)
