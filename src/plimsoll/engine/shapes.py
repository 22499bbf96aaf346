"""The names and shapes of what a role trains, kept in its checkpoint: another model, of which the
checkpoint may hold all that is asked for, and more, is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from plimsoll.engine.checkpoint import broken
from plimsoll.errors import ConfigError
from plimsoll.model.quantization import plain_shape
from plimsoll.run.files import write_whole

_FILE = "weights.json"
_SHOWN = 3


def write_shapes(module: nn.Module, directory: Path) -> None:
    """Say in a checkpoint what weights it is of."""
    write_whole(directory / _FILE, json.dumps(_shapes(module), indent=2) + "\n")


def check_shapes(module: nn.Module, directory: Path) -> None:
    """Hold the module against the checkpoint that it is to go on from.

    Raises:
        ConfigError: it trains other weights, or the checkpoint does not say which it is of.
    """
    try:
        written = dict(json.loads((directory / _FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise broken(directory, f"{_FILE}: {error}") from error
    now = _shapes(module)
    unlike = [
        f"{name}: {written.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in written | now
        if written.get(name) != now.get(name)
    ]
    if unlike:
        raise ConfigError(
            f"The checkpoint {directory} is of another model (shapes, then -> now): "
            f"{', '.join(unlike[:_SHOWN])}{' and more' if len(unlike) > _SHOWN else ''}. Give as "
            f"{directory.name}.model.path what the run began with, or begin another run.directory."
        )


def _shapes(module: nn.Module) -> dict[str, list[int]]:
    trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    return {name: list(plain_shape(p)) for name, p in trained}
