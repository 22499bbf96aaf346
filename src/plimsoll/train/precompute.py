"""The reference scores what the actor will learn from, before the actor is loaded; a file keeps it.

Only what the file lacks is scored. So it serves runs that see their rows in any order, and scoring
that was interrupted goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Generic, TypeVar

from plimsoll.config.model import ModelConfig
from plimsoll.engine.worker import Worker
from plimsoll.errors import ConfigError, Interrupted
from plimsoll.model.fingerprint import model_fingerprint
from plimsoll.records import Sample
from plimsoll.run.counting import counted
from plimsoll.run.stored_logprobs import LogprobStore, StoredLogprobs, read_logprobs, sequence_key
from plimsoll.spec.job import ConfigT
from plimsoll.train.from_data import Work
from plimsoll.train.loading import load_role
from plimsoll.train.update import Packs, log_probs

RowT = TypeVar("RowT")
UnitT = TypeVar("UnitT")


@dataclass(frozen=True)
class ToScore(Generic[UnitT]):
    """All that a run will have its reference score. A unit is what is packed together: a sample, or
    the two of a pair.

    batches: what is packed at the same time in training, from the run's first step on.
    samples: those of a unit. pack: the packs of units, as in training.
    """

    batches: Callable[[], Iterator[Sequence[UnitT]]]
    samples: Callable[[UnitT], Sequence[Sample]]
    pack: Callable[[Sequence[UnitT]], Packs]

    def keys(self, unit: UnitT) -> list[bytes]:
        """What the unit's log-probs are stored by."""
        return [sequence_key(sample) for sample in self.samples(unit)]


def precompute(
    work: Work[ConfigT, RowT], to_score: ToScore[UnitT], given: str | None
) -> Mapping[bytes, float]:
    """The log-probs of all that the run will see, by `sequence_key`: read, and what is missing
    computed. Then the reference is gone from memory. given: the file for them; None: that of the
    run directory.

    Raises ConfigError for a file with those of another reference.
    """
    session = work.session
    path = session.directory.reference_logprobs_path if given is None else Path(given)
    store = LogprobStore(path, _stored(path, work.spec.models["reference"]))
    keys = {key for batch in to_score.batches() for unit in batch for key in to_score.keys(unit)}
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
        for batch in to_score.batches():
            advance(_score(work, to_score, batch, store))
            _stop_if_asked(work, path)
    work.cluster.all(Worker.release, "reference")
    return store.logprobs


def _score(
    work: Work[ConfigT, RowT],
    to_score: ToScore[UnitT],
    batch: Sequence[UnitT],
    store: LogprobStore,
) -> int:
    """Add the log-probs that a batch lacks; how many they are."""
    known = store.logprobs.keys()
    units = [unit for unit in batch if not known >= set(to_score.keys(unit))]
    if not units:
        return 0
    keys = chain.from_iterable(map(to_score.keys, units))
    scored = log_probs("reference", to_score.pack(units), work.cluster).tolist()
    new = {key: value for key, value in zip(keys, scored, strict=True) if key not in known}
    store.add(new)
    return len(new)


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
