"""The reference's log-probs of what the actor learns from, computed in one of three ways: by a
second model, by the actor with its adapter switched off, or once, before the actor is loaded, and
kept in a file.

Of the last, only what the file lacks is scored. So it serves runs that see their rows in any order,
and scoring that was interrupted goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.engine import ReferenceLogprobsConfig
from plimsoll.config.model import ModelConfig
from plimsoll.engine.worker import Worker
from plimsoll.errors import ConfigError, Interrupted
from plimsoll.model.fingerprint import model_fingerprint
from plimsoll.records import Floats, Row, samples_of
from plimsoll.run.counting import counted
from plimsoll.run.stored_logprobs import LogprobStore, StoredLogprobs, read_logprobs, sequence_key
from plimsoll.spec.job import ConfigT
from plimsoll.train.from_data import RowT, Work
from plimsoll.train.loading import load_role
from plimsoll.train.session import Session
from plimsoll.train.update import Packs, log_probs, pack_rows

ScoringPhase = Literal["score", "eval"]

Batches = Callable[[], Iterator[Sequence[Row]]]
"""What a run will have its reference score, from its first step on; each is packed at the same
time in training."""


class Reference(Protocol):
    """Where the reference's numbers come from."""

    def log_probs(self, rows: Sequence[Row], packs: Packs, phase: ScoringPhase) -> Floats:
        """The log-prob (nats) of the response of each sequence of the rows, which `packs` hold;
        what that takes belongs to the phase."""
        ...


@dataclass(frozen=True)
class LiveReference:
    """A role beside the actor, which computes them now."""

    session: Session
    cluster: Cluster

    def log_probs(self, rows: Sequence[Row], packs: Packs, phase: ScoringPhase) -> Floats:
        with self.session.phase(phase, self.cluster):
            return log_probs("reference", packs, self.cluster)


@dataclass(frozen=True)
class StoredReference:
    """Numbers that were computed before; logprobs: by `sequence_key`."""

    logprobs: Mapping[bytes, float]

    def log_probs(self, rows: Sequence[Row], packs: Packs, phase: ScoringPhase) -> Floats:
        found = [self.logprobs[key] for key in _keys(rows)]
        return np.array(found, dtype=np.float32)


def load_compared(
    work: Work[ConfigT, RowT], batches: Batches, logprobs: ReferenceLogprobsConfig
) -> Reference:
    """Load the actor and what it is compared with. logprobs: when the reference scores the batches,
    and where its numbers are kept.

    Raises ConfigError for stored log-probs that are of another reference.
    """
    session, cluster = work.session, work.cluster
    reference: Reference = LiveReference(session, cluster)
    if logprobs.precompute:
        with session.phase("precompute", cluster):
            reference = StoredReference(_precompute(work, batches, logprobs.path))
    with session.phase("load", cluster):
        load_role(cluster, work.spec, "actor")
    if not logprobs.precompute:
        with session.phase("load", cluster):
            load_role(cluster, work.spec, "reference")
    return reference


def _precompute(
    work: Work[ConfigT, RowT], batches: Batches, given: str | None
) -> Mapping[bytes, float]:
    """The log-probs of all that the run will see, by `sequence_key`: read, and what is missing
    computed. Then the reference is gone from memory. given: the file for them; None: that of the
    run directory."""
    session = work.session
    path = session.directory.reference_logprobs_path if given is None else Path(given)
    store = LogprobStore(path, _stored(path, work.spec.models["reference"]))
    keys = {key for batch in batches() for key in _keys(batch)}
    missing = len(keys - store.logprobs.keys())
    if missing == 0:
        session.progress.note(f"the reference's log-probs are those of {path}")
        return store.logprobs
    session.progress.note(
        f"the reference scores {missing:,} of {counted(len(keys), 'sequence')}; their log-probs "
        f"go to {path}"
    )
    load_role(work.cluster, work.spec, "reference")
    with store, session.progress.counting("sequences scored", missing) as advance:
        for batch in batches():
            advance(_score(work, batch, store))
            _stop_if_asked(work, path)
    work.cluster.all(Worker.release, "reference")
    return store.logprobs


def _score(work: Work[ConfigT, RowT], batch: Sequence[Row], store: LogprobStore) -> int:
    """Add the log-probs that a batch lacks; how many they are."""
    known = store.logprobs.keys()
    rows = [row for row in batch if not known >= set(_keys([row]))]
    if not rows:
        return 0
    packs = pack_rows(work.spec, rows, work.cluster)
    scored = log_probs("reference", packs, work.cluster).tolist()
    new = {k: value for k, value in zip(_keys(rows), scored, strict=True) if k not in known}
    store.add(new)
    return len(new)


def _keys(rows: Sequence[Row]) -> list[bytes]:
    """What the log-probs of the rows' sequences are stored by."""
    return [sequence_key(sample) for sample in samples_of(rows)]


def _stop_if_asked(work: Work[ConfigT, RowT], path: Path) -> None:
    if work.session.stop.requested:
        raise Interrupted(
            f"stopped while the reference scored, as asked; what it scored is in {path}. To go on: "
            f"run the same command"
        )


def _stored(path: Path, model: ModelConfig) -> StoredLogprobs:
    """What the file holds; nothing where it is not there."""
    fingerprint = model_fingerprint(model)
    if not path.exists():
        return StoredLogprobs(fingerprint, {})
    stored = read_logprobs(path)
    if stored.fingerprint != fingerprint:
        raise ConfigError(
            f"{path} has the log-probs of another reference than {model.path} in "
            f"{model.dtype}: its fingerprint is {stored.fingerprint[:12]}, and this one's is "
            f"{fingerprint[:12]}. Remove it to have them computed anew, or give another "
            f"reference_logprobs.path."
        )
    return stored
