"""A checkpoint's description of itself: its role's training, division, steps and weights.

By its weights, a checkpoint of another model is refused, even if it holds all requested tensors.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import nn

from plimsoll.config.engine import TrainedRole
from plimsoll.config.problems import show
from plimsoll.errors import ConfigError
from plimsoll.model.quantization import plain_shape
from plimsoll.trainer.checkpoint import CheckpointFile, broken_checkpoint
from plimsoll.trainer.protocol import Steps
from plimsoll.trainer.zero.config import ZeroConfig

_FORM = "form.json"
_WEIGHTS = "weights.json"
_SHOWN = 3
_DIVIDED = {
    "ranks": "cluster.ranks",
    "stage": "zero.stage",
    "optimizer_offload": "zero.optimizer_offload",
    "dtype": "model.dtype",
}
"""The fields of a form that say how it is divided, with their keys in the config."""


@dataclass(frozen=True)
class Form:
    """How a role is trained, and how it is divided over the ranks."""

    ranks: int
    stage: int
    dtype: str
    optimizer_offload: str
    quantization: str
    adapter: str
    optimizer: str
    ema: bool
    freeze: str = "none"

    @classmethod
    def of(cls, role: TrainedRole, ranks: int) -> Form:
        """Return the form of a role that is divided over `ranks` ranks."""
        zero = role.settings_of(ZeroConfig)
        return cls(
            ranks,
            zero.stage,
            role.model.dtype,
            zero.optimizer_offload,
            role.model.quantization,
            "none" if role.adapter is None else role.adapter.model_dump_json(),
            role.optimizer.kind,
            role.ema is not None,
            role.freeze,
        )

    def differences(self, written: Form) -> list[str]:
        """Return the settings that keep this role from going on from the written form.

        Each is `key: then -> now`. Moments in 8 bits cannot be divided anew; else the division is
        no difference.
        """
        if self.optimizer != "adamw_8bit":
            written = replace(written, **{name: getattr(self, name) for name in _DIVIDED})
        then, now = written._settings(), self._settings()
        return [
            f"{key}: {show(then[key])} -> {show(value)}"
            for key, value in now.items()
            if key in then and then[key] != value
        ]

    def _settings(self) -> dict[str, object]:
        """Return the settings by their config keys, without the role's name in front."""
        adapter = {} if self.adapter == "none" else json.loads(self.adapter)
        return {
            **{key: getattr(self, name) for name, key in _DIVIDED.items()},
            "model.quantization": self.quantization,
            "adapter": "given" if adapter else "none",
            **{f"adapter.{name}": value for name, value in adapter.items()},
            "optimizer.kind": self.optimizer,
            "ema": "given" if self.ema else "none",
            "freeze": self.freeze,
        }


def form_file(form: Form, steps: Steps) -> CheckpointFile:
    """Return the file of a checkpoint that has the role's form and its step counts."""
    text = json.dumps({"form": asdict(form), "steps": asdict(steps)}, indent=2)
    return CheckpointFile(_FORM, text + "\n")


def read_form(form: Form, directory: Path) -> Steps:
    """Return a checkpoint's step counts, after checking that this form can go on from it.

    Raises:
        ConfigError: The form is not there, or a role of this form cannot go on from it.
    """
    try:
        content = json.loads((directory / _FORM).read_text(encoding="utf-8"))
        written, steps = Form(**content["form"]), Steps(**content["steps"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise broken_checkpoint(directory, f"{_FORM}: {error}") from error
    if differences := form.differences(written):
        raise ConfigError(
            f"The checkpoint {directory} was written with other settings (then -> now): "
            f"{', '.join(differences)}. {_reason(form)} Give these as they were then to go on with "
            "the run, or begin another run.directory from a saved model "
            f"({directory.name}.model.path)."
        )
    return steps


def _reason(form: Form) -> str:
    if form.optimizer == "adamw_8bit":
        return "Moments in 8 bits are quantised in blocks, and cannot be divided anew."
    return (
        "Masters and moments can be divided anew (ranks, stage, offload, dtype), but not become "
        "those of another adapter, quantization or optimizer, or an average that was not kept."
    )


def shapes_file(module: nn.Module) -> CheckpointFile:
    """Return the file of a checkpoint that has the names and shapes of the trained weights."""
    return CheckpointFile(_WEIGHTS, json.dumps(_shapes(module), indent=2) + "\n")


def check_shapes(module: nn.Module, directory: Path) -> None:
    """Check that the checkpoint's trained weights have the module's names and shapes.

    Raises:
        ConfigError: They differ, or the checkpoint does not list them.
    """
    try:
        written = dict(json.loads((directory / _WEIGHTS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise broken_checkpoint(directory, f"{_WEIGHTS}: {error}") from error
    now = _shapes(module)
    differences = [
        f"{name}: {written.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in written | now
        if written.get(name) != now.get(name)
    ]
    if differences:
        more = " and more" if len(differences) > _SHOWN else ""
        raise ConfigError(
            f"The checkpoint {directory} is of another model (shapes, then -> now): "
            f"{', '.join(differences[:_SHOWN])}{more}. Give as "
            f"{directory.name}.model.path what the run began with, or begin another run.directory."
        )


def _shapes(module: nn.Module) -> dict[str, list[int]]:
    trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    return {name: list(plain_shape(p)) for name, p in trained}
