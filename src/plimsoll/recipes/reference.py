"""The reference's log-probs of what the actor learns from, computed in one of three ways: by a
second model, by the actor with its adapter switched off, or once, before the actor is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import numpy as np

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.engine import FrozenRole
from plimsoll.config.jobs import ComparedJobConfig
from plimsoll.engine.worker import Role, Worker
from plimsoll.errors import ConfigError, Interrupted
from plimsoll.model.fingerprint import model_fingerprint
from plimsoll.recipes.from_data import Work
from plimsoll.recipes.roles import load_reference
from plimsoll.recipes.session import Session
from plimsoll.recipes.update import Packs, in_batch_order
from plimsoll.records import Floats, Sample
from plimsoll.run.stored_logprobs import (
    StoredLogprobs,
    read_logprobs,
    sequence_key,
    write_logprobs,
)

ConfigT = TypeVar("ConfigT", bound=ComparedJobConfig)
RowT = TypeVar("RowT")

ScoringPhase = Literal["score", "eval"]


@dataclass(frozen=True)
class ToScore:
    """Sequences that are scored together. pack: makes their packs, the same ones as in training."""

    samples: Sequence[Sample]
    pack: Callable[[], Packs]


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


def load_compared(work: Work[ConfigT, RowT], batches: Iterable[ToScore]) -> Reference:
    """Load the actor and what it is compared with; batches: all that the reference will score.

    Raises ConfigError for stored log-probs that are not those of this reference and these batches.
    """
    config, session, cluster = work.config, work.session, work.cluster
    reference: Reference = LiveReference(session, cluster)
    precompute = config.reference_logprobs.precompute
    if precompute:
        with session.phase("precompute", cluster):
            reference = StoredReference(_stored(work, batches).logprobs)
    load_actor(work)
    if not precompute:
        with session.phase("load", cluster):
            load_reference(cluster, config.reference, config.actor, 1.0)
    return reference


def load_actor(work: Work[ConfigT, RowT]) -> None:
    """Load what learns on all ranks."""
    actor, seed = work.config.actor, work.config.run.seed
    with work.session.phase("load", work.cluster):
        work.cluster.all(Worker.load_policy, "actor", actor, 1.0, seed)


def log_probs(role: Role, packs: Packs, ranks: Cluster) -> Floats:
    """The log-prob (nats) of the response of each sequence of a batch, in the batch's order."""
    found = ranks.each(Worker.sequence_log_probs, [(role, own) for own in packs])
    return in_batch_order(packs, found)


def _stored(work: Work[ConfigT, RowT], batches: Iterable[ToScore]) -> StoredLogprobs:
    """Read the file, or compute it."""
    config, session = work.config, work.session
    given = config.reference_logprobs.path
    path = session.directory.reference_logprobs_path if given is None else Path(given)
    role = config.reference or FrozenRole(model=config.actor.model)
    fingerprint = model_fingerprint(role.model)
    if path.exists():
        stored = read_logprobs(path)
        _check(stored, fingerprint, batches, role, path)
        session.progress.note(f"the reference's log-probs are those of {path}")
        return stored
    stored = StoredLogprobs(fingerprint, _score(work, role, batches))
    write_logprobs(path, stored)
    session.progress.note(
        f"the reference scored {len(stored.logprobs):,} sequences; their log-probs are in {path}"
    )
    return stored


def _score(
    work: Work[ConfigT, RowT], role: FrozenRole, batches: Iterable[ToScore]
) -> dict[bytes, float]:
    """What the reference says of every sequence, by its key; then it is gone from memory."""
    cluster, found = work.cluster, dict[bytes, float]()
    cluster.all(Worker.load_policy, "reference", role, 1.0)
    for batch in batches:
        keys = [sequence_key(sample) for sample in batch.samples]
        if not found.keys() >= set(keys):
            scored = log_probs("reference", batch.pack(), cluster)
            for key, logprob in zip(keys, scored, strict=True):
                found.setdefault(key, float(logprob))
        if work.session.stop.requested:
            raise Interrupted(
                "stopped while the reference scored, as asked: nothing of it was kept. To go on: "
                "run the same command"
            )
    cluster.all(Worker.release, "reference")
    return found


def _check(
    stored: StoredLogprobs,
    fingerprint: str,
    batches: Iterable[ToScore],
    role: FrozenRole,
    path: Path,
) -> None:
    way_out = "Remove it to have them computed anew, or give another reference_logprobs.path."
    if stored.fingerprint != fingerprint:
        raise ConfigError(
            f"{path} has the log-probs of another reference than {role.model.path} in "
            f"{role.model.dtype}: its fingerprint is {stored.fingerprint[:12]}, and this one's is "
            f"{fingerprint[:12]}. {way_out}"
        )
    keys = {sequence_key(sample) for batch in batches for sample in batch.samples}
    missing = len(keys - stored.logprobs.keys())
    if missing:
        raise ConfigError(
            f"{path} has no log-probs of {missing:,} of the {len(keys):,} sequences that this run "
            f"will see: its rows, lengths or template are others (for KTO also the order of rows: "
            f"run.seed, batch.sequences, data.shuffle). {way_out}"
        )
