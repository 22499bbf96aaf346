"""Compute the reference's log-probs of the responses that the actor learns from.

There are three ways: a second model scores each batch; the actor scores it with its adapter
switched off; or the reference scores all batches before the actor is loaded, and a file keeps the
results.

Only sequences that the file lacks are scored. So the file serves runs with any order of rows, and
interrupted scoring continues where it stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
from huggingface_hub import snapshot_download

from plimsoll.config.engine import ModelConfig, ReferenceLogprobsConfig
from plimsoll.errors import ConfigError, Interrupted
from plimsoll.model.checks import as_config_error
from plimsoll.records import Floats, Row, samples_of
from plimsoll.resolve.job import ConfigT
from plimsoll.resolve.roles import RoleName
from plimsoll.run.numbers import plural
from plimsoll.run.stored_logprobs import LogprobStore, StoredLogprobs, read_logprobs, sequence_key
from plimsoll.train.from_data import RowT, Work
from plimsoll.train.loading import load_role, load_roles
from plimsoll.train.update import Packs, log_probs, pack_rows
from plimsoll.trainer.worker import Worker

ScoringPhase = Literal["score", "eval"]

Batches = Callable[[], Iterator[Sequence[Row]]]
"""Yields the batches that the reference will score, in order; each batch is packed by itself."""


Reference = Callable[[Sequence[Row], Packs, ScoringPhase], Floats]
"""A function of (rows, packs, phase): the reference's log-prob (nats) of each sequence's response.

The packs hold these rows; the time is counted in `phase`.
"""


def load_with_reference(
    work: Work[ConfigT, RowT], name: RoleName, batches: Batches, logprobs: ReferenceLogprobsConfig
) -> Reference:
    """Load the roles, and return the function that gives the log-probs of the reference.

    `name` is the role that is the reference. With `logprobs.precompute` the function looks
    log-probs up; otherwise the reference is loaded too, and scores. Raises ConfigError if the
    stored log-probs are those of another reference.
    """
    session, cluster = work.session, work.cluster

    def score_now(rows: Sequence[Row], packs: Packs, phase: ScoringPhase) -> Floats:
        with session.phase(phase, cluster):
            return log_probs(name, packs, cluster)

    if not logprobs.precompute:
        load_roles(work)
        return score_now
    with session.phase("precompute", cluster):
        stored = _precompute(work, name, batches, logprobs.path)
    with session.phase("load", cluster):
        load_role(cluster, work.spec, work.spec.sender.name)
    return lambda rows, packs, phase: np.array([stored[k] for k in _keys(rows)], dtype=np.float32)


def _precompute(
    work: Work[ConfigT, RowT], name: RoleName, batches: Batches, configured: str | None
) -> Mapping[bytes, float]:
    """Return the log-probs of all batches by `sequence_key`.

    They are read from the file `configured` (None: a file in the run directory). The reference is
    loaded to score the missing ones, which are added to the file, and is then released.
    """
    session = work.session
    path = session.directory.reference_logprobs_path if configured is None else Path(configured)
    store = LogprobStore(path, _read_stored(path, work.spec.models[name]))
    keys = {key for batch in batches() for key in _keys(batch)}
    missing = len(keys - store.logprobs.keys())
    if missing == 0:
        session.progress.note(f"the reference's log-probs are those of {path}")
        return store.logprobs
    session.progress.note(
        f"the reference scores {missing:,} of {plural(len(keys), 'sequence')}; their log-probs "
        f"go to {path}"
    )
    load_role(work.cluster, work.spec, name)
    with store, session.progress.counting("sequences scored", missing) as advance:
        for batch in batches():
            advance(_score(work, name, batch, store))
            if session.stop.requested:
                raise Interrupted(
                    f"stopped while the reference scored, as asked; what it scored is in {path}. "
                    f"To go on: run the same command"
                )
    work.cluster.all(Worker.release, name)
    return store.logprobs


def _score(
    work: Work[ConfigT, RowT], name: RoleName, batch: Sequence[Row], store: LogprobStore
) -> int:
    """Score the sequences of a batch that the store lacks, add them, and return their number."""
    known = store.logprobs.keys()
    rows = [row for row in batch if not known >= set(_keys([row]))]
    if not rows:
        return 0
    packs = pack_rows(work.spec, rows, work.cluster)
    scored = log_probs(name, packs, work.cluster).tolist()
    new = {k: value for k, value in zip(_keys(rows), scored, strict=True) if k not in known}
    store.add(new)
    return len(new)


def _keys(rows: Sequence[Row]) -> list[bytes]:
    return [sequence_key(sample) for sample in samples_of(rows)]


def _read_stored(path: Path, model: ModelConfig) -> StoredLogprobs:
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


_DECIDING = ("config.json", "*.safetensors")


def model_fingerprint(model: ModelConfig) -> str:
    """Return a hash (XXH3, 128 bits, hexadecimal) of config.json, weights, dtype and quantisation.

    Every byte of the weights is read, because models of one architecture differ only there. A model
    of the hub is downloaded if it is not in the cache. Raises ConfigError if files cannot be read.
    """
    directory = Path(model.path)
    with as_config_error(model.path, "weights"):
        if not directory.is_dir():
            directory = Path(snapshot_download(model.path, allow_patterns=list(_DECIDING)))
        files = sorted(file for pattern in _DECIDING for file in directory.glob(pattern))
        digests = {file.name: _digest(file) for file in files}
    scales = model.quantization != "none" and model.double_quantization
    facts = [model.dtype, model.quantization, scales, digests]
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
