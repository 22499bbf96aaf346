"""The weights' way from the ranks of the actor to the engines, over any cluster."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plimsoll.cluster.protocol import Cluster
from plimsoll.data.packing import pack
from plimsoll.engine.worker import Worker
from plimsoll.records import Floats, Ints, Sample, from_packed
from plimsoll.rollout.protocol import RolloutEngine


class ActorRoute:
    """A `WeightRoute` for the actor. as_published: the engines load weights as a model's files
    have them, or as transformers' model does."""

    def __init__(self, cluster: Cluster, largest_pack: int, as_published: bool) -> None:
        self._cluster = cluster
        self._largest = largest_pack
        self._as_published = as_published

    def plan(self, bucket_bytes: int) -> tuple[tuple[str, ...], ...]:
        return self._cluster.all(Worker.weight_plan, "actor", bucket_bytes)[0]

    def begin(self) -> None:
        names = self._cluster.all(Worker.weight_names, "actor", self._as_published)[0]
        self._cluster.engines_do(RolloutEngine.begin_sync, names)

    def send(self, names: tuple[str, ...]) -> None:
        wanted = ("actor", names, self._as_published)
        self._cluster.hand_over(Worker.weight_bucket, wanted, RolloutEngine.receive)

    def finish(self, version: int) -> None:
        self._cluster.engines_do(RolloutEngine.finish_sync, version)

    def trainer_log_probs(self, sequences: Sequence[Ints]) -> list[Floats]:
        samples = [Sample(tokens, _all_but_first(len(tokens))) for tokens in sequences]
        packs = pack(samples, self._cluster.ranks, max(self._largest, *map(len, sequences)))
        found = self._cluster.each(Worker.probe_log_probs, [("actor", own) for own in packs])
        flat = [p for own in packs for p in own]
        return from_packed(flat, [x for own in found for x in own], len(samples))

    def engine_log_probs(self, sequences: Sequence[Ints]) -> list[list[Floats]]:
        return self._cluster.engines_do(RolloutEngine.log_probs, tuple(sequences))


class AdapterRoute:
    """A `WeightRoute` for the actor's adapter alone: the engines hold its base already."""

    def __init__(self, cluster: Cluster, actor: ActorRoute) -> None:
        self._cluster = cluster
        self.trainer_log_probs = actor.trainer_log_probs
        self.engine_log_probs = actor.engine_log_probs

    def plan(self, bucket_bytes: int) -> tuple[tuple[str, ...], ...]:
        return ()

    def begin(self) -> None:
        pass

    def send(self, names: tuple[str, ...]) -> None:
        raise AssertionError("an adapter goes in one piece, at the end")

    def finish(self, version: int) -> None:
        self._cluster.hand_over(
            Worker.adapter_files, ("actor", version), RolloutEngine.take_adapter
        )


def _all_but_first(length: int) -> np.ndarray:
    loss_mask = np.ones(length, dtype=np.bool_)
    loss_mask[0] = False
    return loss_mask
