"""Tensors in a file with their checksums: what a disk or a copy changed is not trained on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from plimsoll.engine.weights import hash_bytes


def save_checked(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors of this host, and in the file's metadata the checksum of each."""
    save_file(tensors, path, {name: hash_bytes(tensor) for name, tensor in tensors.items()})


def checksums(file: Any) -> Mapping[str, str]:
    """Of the tensors of a file that `safe_open` gives; none in one of an earlier version."""
    written: Mapping[str, str] = file.metadata() or {}
    return written


def check(written: Mapping[str, str], name: str, tensor: Tensor) -> None:
    """Hold a whole tensor that was read against the checksum that was written with it.

    Raises:
        SafetensorError: it is not what was written.
    """
    if name in written and written[name] != hash_bytes(tensor):
        raise SafetensorError(f"{name} is not what was written: its checksum is another")
