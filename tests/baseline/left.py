"""What a run leaves, as texts: files by name, with all in them but what the clock and the machine
decide."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
from plain import pretty

_OF_THE_MACHINE = re.compile(
    r"seconds\b|seconds/|memory_bytes/|tokens_per_second|capacity_bytes|transformers_version"
)
_MEASURED = ("measured", "held", "line")


def digest(made: Path, *, exact: bool) -> dict[str, str]:
    """Of a directory or a file, by names. exact: with its values, not only its structure."""
    files = sorted(path for path in made.rglob("*") if path.is_file()) if made.is_dir() else [made]
    names = [str(path.relative_to(made)) if made.is_dir() else made.name for path in files]
    found = {"files.txt": "\n".join(names)}
    for path, name in zip(files, names, strict=True):
        content = _content(path, exact)
        if content is not None:
            found[f"{name}.txt"] = content
    return found


def _content(path: Path, exact: bool) -> str | None:
    """None for what only the name is looked at of."""
    match path.suffix:
        case ".safetensors":
            return "\n".join(_tensors(path, exact))
        case ".jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            if path.name == "metrics.jsonl":
                return "\n".join(line for row in rows for line in _figures(row, exact))
            measured = path.name == "ledger.jsonl"
            return "\n".join(_row(_ledger_row(row) if measured else row, exact) for row in rows)
        case ".json":
            measured = path.name.endswith("calibration.json")
            content = json.loads(path.read_text())
            if path.name == "adapter_config.json":  # a set of PEFT's, in any order
                content["target_modules"] = sorted(content["target_modules"])
            return _row(content, exact and not measured)
        case ".parquet":
            rows = parquet.read_table(path).to_pylist()
            return "\n".join(_row(row, exact) for row in rows)
        case ".yaml" | ".jinja":
            return path.read_text()
    return None


def _tensors(path: Path, exact: bool) -> Iterator[str]:
    """A line for each: name, type, shape, and SHA-256 of the bytes. Read as the format is
    specified: the length of a header, the header as JSON, and the bytes that it divides."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    metadata = header.pop("__metadata__", {})
    yield f"metadata {json.dumps(metadata, sort_keys=True) if exact else sorted(metadata)}"
    for name, one in sorted(header.items()):
        first, end = (start + offset for offset in one["data_offsets"])
        shown = hashlib.sha256(raw[first:end]).hexdigest() if exact else ""
        yield f"{name} {one['dtype']} {one['shape']} {shown}".rstrip()


def _figures(row: dict[str, Any], exact: bool) -> Iterator[str]:
    """A line for each figure of a step."""
    shown = _without_machine(row) if exact else _structure(_without_machine(row))
    for name, value in shown.items():
        yield f"step {row.get('step')} {name}: {json.dumps(value)}"


def _ledger_row(row: dict[str, Any]) -> dict[str, Any]:
    """What was measured, only by its keys."""
    keys = {name: sorted(row[name]) for name in _MEASURED if row.get(name) is not None}
    return {**row, **keys}


def _row(value: Any, exact: bool) -> str:
    plain = _without_machine(value)
    return pretty(plain if exact else _structure(plain))


def _without_machine(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if not _OF_THE_MACHINE.search(str(key))}
        gone = {key: "#" for key in value if key not in kept}
        return {key: _without_machine(one) for key, one in (kept | gone).items()}
    if isinstance(value, list):
        return [_without_machine(one) for one in value]
    return value


def _structure(value: Any) -> Any:
    """Numbers without their values, and lists of them without their lengths."""
    if isinstance(value, dict):
        return {key: _structure(one) for key, one in value.items()}
    if isinstance(value, list):
        return ["#"] if value and not isinstance(value[0], dict) else [_structure(x) for x in value]
    return value if isinstance(value, str | bool) or value is None else "#"
