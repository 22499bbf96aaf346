"""New weights to every engine, and the proof that they arrived.

Three things must hold after a sync, or the run stops: every announced tensor came, with the bytes
that were sent (`arrivals.py`, in the engine); and what the engine computes with them is what the
trainer computes: the log-probs of a probe batch agree. The last catches what no checksum can, such
as an engine that keeps a stale packed copy of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from plimsoll.config.rollout import SyncConfig
from plimsoll.errors import WeightSyncError
from plimsoll.records import Floats, Ints


class WeightRoute(Protocol):
    """The way from the trainer's ranks to the engines; the cluster knows it."""

    def plan(self, bucket_bytes: int) -> tuple[tuple[str, ...], ...]:
        """The trainer's parameters, bucket by bucket."""
        ...

    def begin(self) -> None:
        """Announce all tensors to all engines."""
        ...

    def send(self, names: tuple[str, ...]) -> None:
        """Gather one bucket and hand it to all engines."""
        ...

    def finish(self, version: int) -> None:
        """Have all engines use the new weights."""
        ...

    def trainer_log_probs(self, sequences: Sequence[Ints]) -> list[Floats]:
        """The trainer's log-prob of every token but the first; temperature 1."""
        ...

    def engine_log_probs(self, sequences: Sequence[Ints]) -> list[list[Floats]]:
        """The same by every engine."""
        ...


@dataclass(frozen=True)
class SyncReport:
    """gap: the largest mean absolute difference of log-probs over the engines, nats per token."""

    version: int
    gap: float


def sync_weights(
    route: WeightRoute, config: SyncConfig, version: int, probe: Sequence[Ints]
) -> SyncReport:
    """Send the trainer's weights to all engines as `version`, then prove it.

    probe: a few token sequences, each of 2 tokens or more.

    Raises:
        WeightSyncError: with both numbers, when an engine disagrees with the trainer.
    """
    route.begin()
    for names in route.plan(config.bucket_bytes):
        route.send(names)
    route.finish(version)
    return SyncReport(version, prove(route, config.max_logprob_gap, version, probe))


def prove(route: WeightRoute, bound: float, version: int, probe: Sequence[Ints]) -> float:
    """Compare the log-probs of the probe; returns the largest mean gap, nats per token."""
    expected = np.concatenate(route.trainer_log_probs(probe))
    gaps = []
    for index, found in enumerate(route.engine_log_probs(probe)):
        sampled = np.concatenate(found)
        gap = float(np.abs(sampled - expected).mean())
        if not gap <= bound:
            raise WeightSyncError(_disagreement(index, version, expected, sampled, gap, bound))
        gaps.append(gap)
    return max(gaps)


def _disagreement(
    engine: int, version: int, expected: Floats, sampled: Floats, gap: float, bound: float
) -> str:
    worst = int(np.abs(sampled - expected).argmax())
    return (
        f"rollout engine {engine} does not compute what the trainer computes after weight sync "
        f"{version}: over {len(expected)} probe tokens the mean log-prob is {sampled.mean():.4f} "
        f"in the engine and {expected.mean():.4f} in the trainer, mean absolute difference "
        f"{gap:.4f} (bound rollout.sync.max_logprob_gap = {bound}); the worst token has "
        f"{sampled[worst]:.4f} and {expected[worst]:.4f}. The engine has other weights than the "
        "trainer (a tensor stale, dropped or misnamed), or computes in a much coarser dtype: "
        "compare rollout.dtype with actor.model.dtype before raising the bound"
    )
