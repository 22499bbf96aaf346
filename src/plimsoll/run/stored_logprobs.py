"""A Parquet file of sequence log-probs, so that a model scores each sequence once.

It has one row per sequence. A sequence is identified by a hash of its tokens and loss mask, so any
run with some of the sequences can use the file. The model is identified by its fingerprint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from plimsoll.errors import ConfigError
from plimsoll.records import Sample
from plimsoll.run.files import whole_file

WRITE_SECONDS = 30.0
"""The most seconds of scoring that are lost if the process is killed."""

_KEY_BYTES = 16
_ABOUT = b"plimsoll.stored_logprobs"
"""Key of the file's metadata, which has the model's fingerprint."""
_SCHEMA = pa.schema([("sequence", pa.binary(_KEY_BYTES)), ("logprob", pa.float32())])


@dataclass(frozen=True)
class StoredLogprobs:
    """Log-probs of sequences under one model."""

    fingerprint: str
    """Fingerprint of the model that scored."""
    logprobs: Mapping[bytes, float]
    """Sum of the log-probs of a sequence's learned tokens, in nats, by its `sequence_key`."""


class LogprobStore:
    """A context manager that collects log-probs and writes them to a file.

    It writes the file every `WRITE_SECONDS`, and at the end even after an error. Each time the file
    is replaced atomically.
    """

    def __init__(self, path: Path, stored: StoredLogprobs) -> None:
        self._path = path
        self._fingerprint = stored.fingerprint
        self._logprobs = dict(stored.logprobs)
        self._on_disk = len(self._logprobs)
        self._written = time.monotonic()

    @property
    def logprobs(self) -> Mapping[bytes, float]:
        """All log-probs by `sequence_key`."""
        return self._logprobs

    def add(self, logprobs: Mapping[bytes, float]) -> None:
        """Add log-probs by `sequence_key`; a signal cannot interrupt between two of them."""
        self._logprobs.update(logprobs)
        if time.monotonic() - self._written >= WRITE_SECONDS:
            self._write()

    def _write(self) -> None:
        if len(self._logprobs) > self._on_disk:
            write_logprobs(self._path, StoredLogprobs(self._fingerprint, self._logprobs))
        self._on_disk = len(self._logprobs)
        self._written = time.monotonic()

    def __enter__(self) -> LogprobStore:
        return self

    def __exit__(self, *error: object) -> None:
        self._write()


def sequence_key(sample: Sample) -> bytes:
    """Return a hash of a sample's tokens and loss mask, 16 bytes."""
    tokens = sample.tokens.astype(np.int64)
    return xxhash.xxh3_128_digest(tokens.tobytes() + sample.loss_mask.tobytes())


def write_logprobs(path: Path, stored: StoredLogprobs) -> None:
    """Write the file atomically; raise PlimsollError if the disk is full or not writable."""
    columns = [list(stored.logprobs), list(stored.logprobs.values())]
    about = {_ABOUT: json.dumps({"fingerprint": stored.fingerprint})}
    table = pa.table(columns, schema=_SCHEMA).replace_schema_metadata(about)
    with whole_file(path) as partial:
        pq.write_table(table, partial)


def read_logprobs(path: Path) -> StoredLogprobs:
    """Return the log-probs in a file; raise ConfigError if it is no file of log-probs."""
    try:
        table = pq.read_table(path)
        about = json.loads((table.schema.metadata or {})[_ABOUT])
        sequences, logprobs = (table.column(name).to_pylist() for name in _SCHEMA.names)
        return StoredLogprobs(about["fingerprint"], dict(zip(sequences, logprobs, strict=True)))
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise ConfigError(
            f"{path} holds no log-probs of a reference: {type(error).__name__}: {error}. Remove it "
            f"to have them computed, or give another reference_logprobs.path."
        ) from error
