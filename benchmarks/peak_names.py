"""Which model, and which card, the name in a published row means."""

from __future__ import annotations

import re
from pathlib import Path

from peak_numbers import NotKnown
from plimsoll.errors import ConfigError
from plimsoll.machine.hardware import find_card
from plimsoll.shapes.known_models import known_models, read_shape
from plimsoll.shapes.shape import ModelShape

_ALIKE = 0.002
"""Of their parameters, that variants of one model may differ in: a few tokens more."""


def shape(name: str) -> tuple[ModelShape, str]:
    """Of a directory with a config.json, or of a known model: also where its organisation, `-hf`,
    `Meta-`, how its weights are kept, or its version are left out, if all versions are as large.
    And what was read into the name; empty: nothing."""
    if Path(name).is_dir():
        return _local(name), ""
    bare = _bare(name)
    known = {_bare(one): one for one in reversed(list(known_models()))}
    if bare in known:
        return read_shape(known[bare]), ""
    shorter = re.sub(r"-\d+k$", "", bare)
    if shorter in known:  # trained further on longer contexts: as large
        return read_shape(known[shorter]), f"model {name} as {known[shorter]}"
    variants = [one for one in reversed(known) if one.startswith(f"{bare}-")]
    shapes = [read_shape(known[one]) for one in variants]
    sizes = [one.parameters for one in shapes]
    if not bare or not sizes or max(sizes) > min(sizes) * (1 + _ALIKE):
        raise NotKnown("model", name)
    return shapes[0], f"model {name} as {known[variants[0]]}"


def _local(name: str) -> ModelShape:
    try:
        return read_shape(name)
    except ConfigError as error:
        raise NotKnown("model", name) from error


def _bare(name: str) -> str:
    last = re.sub(r"[()]", " ", name.lower()).strip().rpartition("/")[2]
    last = re.sub(r"[-_](gptq|awq|bnb|int[48]|[48]bit|fp16|bf16)\b", "", last)
    last = last.removeprefix("meta-").removesuffix("-hf")
    return re.sub(r"[ ._-]+|(?<=[a-z])(?=\d)", "-", last).strip("-")


def capacity(gpu: str) -> int | None:
    """Bytes of a card, of which there may be several; None where it is not known."""
    try:
        return find_card(re.sub(r"^\d+ ?[x*] ?", "", gpu.lower())).usable_bytes
    except ConfigError:
        return None
