"""Log-probs of sequences that a model scored once, as Parquet: a row for each sequence.

A sequence is known by a hash of its tokens and of which of them are learned, so a file serves every
run that has some of its sequences, in whatever order; the model is known by its fingerprint.
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
"""At most so much scoring is lost to a kill."""

_KEY_BYTES = 16
_ABOUT = b"plimsoll.stored_logprobs"
"""The key of the file's metadata that says what it holds."""
_SCHEMA = pa.schema([("sequence", pa.binary(_KEY_BYTES)), ("logprob", pa.float32())])


@dataclass(frozen=True)
class StoredLogprobs:
    """fingerprint: of the model that scored. logprobs: nats, of all learned tokens of a sequence
    together, by its `sequence_key`."""

    fingerprint: str
    logprobs: Mapping[bytes, float]


class LogprobStore:
    """Log-probs that grow, and their file; a context manager.

    What is added within it goes to the file now and then, and at the end, however it comes; the
    file is whole at any time. stored: what the file holds already.
    """

    def __init__(self, path: Path, stored: StoredLogprobs) -> None:
        self._path = path
        self._fingerprint = stored.fingerprint
        self._logprobs = dict(stored.logprobs)
        self._on_disk = len(self._logprobs)
        self._written = time.monotonic()

    @property
    def logprobs(self) -> Mapping[bytes, float]:
        """All, by `sequence_key`."""
        return self._logprobs

    def add(self, logprobs: Mapping[bytes, float]) -> None:
        """Take what is new; a signal comes before or after all of it."""
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
    """A hash of the sample's tokens and learned marks; 16 bytes."""
    tokens = sample.tokens.astype(np.int64)
    return xxhash.xxh3_128_digest(tokens.tobytes() + sample.loss_mask.tobytes())


def write_logprobs(path: Path, stored: StoredLogprobs) -> None:
    """Write the file, whole or not at all.

    Raises PlimsollError with the path where the disk is full or not writable.
    """
    columns = [list(stored.logprobs), list(stored.logprobs.values())]
    about = {_ABOUT: json.dumps({"fingerprint": stored.fingerprint})}
    table = pa.table(columns, schema=_SCHEMA).replace_schema_metadata(about)
    with whole_file(path) as partial:
        pq.write_table(table, partial)


def read_logprobs(path: Path) -> StoredLogprobs:
    """Read it back. Raises ConfigError for a file that is not what `write_logprobs` writes."""
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
