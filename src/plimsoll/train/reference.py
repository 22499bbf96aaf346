"""The reference's log-probs of what the actor learns from, computed in one of three ways: by a
second model, by the actor with its adapter switched off, or once, before the actor is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.reference_logprobs import ReferenceLogprobsConfig
from plimsoll.records import Floats, Sample
from plimsoll.run.stored_logprobs import sequence_key
from plimsoll.spec.job import ConfigT
from plimsoll.train.from_data import Work
from plimsoll.train.loading import load_role
from plimsoll.train.precompute import ToScore, precompute
from plimsoll.train.session import Session
from plimsoll.train.update import Packs, log_probs

RowT = TypeVar("RowT")
UnitT = TypeVar("UnitT")

ScoringPhase = Literal["score", "eval"]


class Reference(Protocol):
    """Where the reference's numbers come from."""

    def log_probs(self, samples: Sequence[Sample], packs: Packs, phase: ScoringPhase) -> Floats:
        """The log-prob (nats) of the response of each sample of a batch, which `packs` hold; what
        that takes belongs to the phase."""
        ...


@dataclass(frozen=True)
class LiveReference:
    """A role beside the actor, which computes them now."""

    session: Session
    cluster: Cluster

    def log_probs(self, samples: Sequence[Sample], packs: Packs, phase: ScoringPhase) -> Floats:
        with self.session.phase(phase, self.cluster):
            return log_probs("reference", packs, self.cluster)


@dataclass(frozen=True)
class StoredReference:
    """Numbers that were computed before; logprobs: by `sequence_key`."""

    logprobs: Mapping[bytes, float]

    def log_probs(self, samples: Sequence[Sample], packs: Packs, phase: ScoringPhase) -> Floats:
        found = [self.logprobs[sequence_key(sample)] for sample in samples]
        return np.array(found, dtype=np.float32)


def load_compared(
    work: Work[ConfigT, RowT], to_score: ToScore[UnitT], logprobs: ReferenceLogprobsConfig
) -> Reference:
    """Load the actor and what it is compared with; to_score: all that the reference will score.
    logprobs: when it does, and where its numbers are kept.

    Raises ConfigError for stored log-probs that are of another reference.
    """
    session, cluster = work.session, work.cluster
    reference: Reference = LiveReference(session, cluster)
    if logprobs.precompute:
        with session.phase("precompute", cluster):
            reference = StoredReference(precompute(work, to_score, logprobs.path))
    with session.phase("load", cluster):
        load_role(cluster, work.spec, "actor")
    if not logprobs.precompute:
        with session.phase("load", cluster):
            load_role(cluster, work.spec, "reference")
    return reference
