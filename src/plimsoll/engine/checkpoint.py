"""What a checkpoint can be read back into: a role that is divided as the one that wrote it was.

DeepSpeed keeps every rank's own part of masters and moments and does not divide them anew; asked
to, it fails with whatever error comes first. So the form is written beside, and compared.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from plimsoll.config.engine import TrainedRole
from plimsoll.errors import ConfigError
from plimsoll.run.files import write_whole

_FILE = "form.json"


@dataclass(frozen=True)
class Form:
    """How weights, masters and moments are laid out over the ranks."""

    ranks: int
    stage: int
    dtype: str
    optimizer_offload: str
    quantization: str
    adapter: str
    optimizer: str = "adamw"

    @classmethod
    def of(cls, role: TrainedRole, ranks: int) -> Form:
        return cls(
            ranks,
            role.zero.stage,
            role.model.dtype,
            role.zero.optimizer_offload,
            role.model.quantization,
            "none" if role.adapter is None else role.adapter.model_dump_json(),
            role.optimizer.kind,
        )

    def __str__(self) -> str:
        return (
            f"cluster.ranks {self.ranks}, zero.stage {self.stage}, "
            f"zero.optimizer_offload {self.optimizer_offload}, model.dtype {self.dtype}, "
            f"model.quantization {self.quantization}, adapter {self.adapter}, "
            f"optimizer.kind {self.optimizer}"
        )


def write_form(form: Form, directory: Path) -> None:
    """Say in a checkpoint how it is divided."""
    write_whole(directory / _FILE, json.dumps(asdict(form)) + "\n")


def check_form(form: Form, directory: Path) -> None:
    """Raise ConfigError where the checkpoint is not there or was written in another form."""
    try:
        written = Form(**json.loads((directory / _FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{directory} holds no whole checkpoint of this role ({_FILE}: {error}). Resume from "
            f"another checkpoint (remove this one), or start a new run.directory."
        ) from error
    if written != form:
        raise ConfigError(
            f"The checkpoint {directory} was written with {written}; this run has {form}. Masters "
            f"and moments cannot be divided anew: resume with the settings of the checkpoint, or "
            f"start a new run.directory from a saved model."
        )
