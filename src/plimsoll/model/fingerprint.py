"""Compute a fingerprint of a frozen model: a hash of all that decides its log-probs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import xxhash
from huggingface_hub import snapshot_download

from plimsoll.config.model import ModelConfig
from plimsoll.model.checks import as_config_error

_DECIDING = ("config.json", "*.safetensors")


def model_fingerprint(model: ModelConfig) -> str:
    """Return a hash (XXH3, 128 bits, hexadecimal) of config.json, weights, dtype and quantisation.

    It reads every byte of the weights once: models of one shape differ in nothing else. It
    downloads a model from the hub if it is not in the cache. Raises ConfigError for files that
    cannot be read.
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
