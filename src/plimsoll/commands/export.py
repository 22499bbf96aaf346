"""Write a run's checkpoint as a Hugging Face directory, for any ZeRO stage and number of ranks.

`plimsoll export RUN|CHECKPOINT --to DIRECTORY`

The weights are the checkpoint's fp32 master weights, or their moving average if the run keeps one.
So weights written as float32 are exact, and as bfloat16 they are those that the trainer used.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.commands.found_models import FoundCheckpoint
from plimsoll.commands.merge import load_plain, write_plain
from plimsoll.config.engine import Dtype, TrainedRole
from plimsoll.data.template import given_template
from plimsoll.errors import ConfigError
from plimsoll.model.adapters import add_adapter, save_adapter
from plimsoll.model.load import load_tokenizer
from plimsoll.model.policy import PolicyModel, companions
from plimsoll.model.value import ValueModel
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.trainer.checkpoint import read_weights


def export_checkpoint(
    checkpoint: FoundCheckpoint, to: Path, dtype: Dtype | None, *, merge: bool
) -> None:
    """Write the actor of a checkpoint to the directory `to`.

    Args:
        checkpoint: The checkpoint and the spec of its run.
        to: The directory to write.
        dtype: Dtype of the written weights; None for the run's.
        merge: Whether to merge an adapter into its base. If not, an adapter is written in PEFT's
            format.

    Raises ConfigError if the checkpoint does not fit the model that its config names.
    """
    role = checkpoint.spec.actor
    kind = "master" if role.ema is None else "average"
    weights = read_weights(checkpoint.path / "actor", kind)
    dtype = dtype or role.model.dtype
    module = _load(checkpoint.spec, dtype, merge=merge)
    _fill(module, weights, checkpoint.path)
    tokenizer = load_tokenizer(role.model.path, role.model.trust_remote_code)
    beside = companions(module.lm, tokenizer, given_template(checkpoint.spec.data))
    if role.adapter is None or merge:
        template = checkpoint.spec.data.chat_template
        write_plain(module, getattr(torch, dtype), beside, to, template)
    else:
        parts = {name: module.get_parameter(name).detach() for name in weights}
        trained = {name: part.to(getattr(torch, dtype)) for name, part in parts.items()}
        save_adapter(module, trained, beside, to)


def _load(spec: RunSpec[Any], dtype: Dtype, *, merge: bool) -> PolicyModel | ValueModel:
    """Return the model from which training began, and an adapter of the run's shape if it had one.

    The model is in fp32 if the run or the output is. A 4-bit base is quantized only for a merge,
    which must add the adapter to the quantized values.
    """
    role: TrainedRole = spec.actor
    wide = "float32" in (dtype, role.model.dtype)
    changes: dict[str, object] = {
        "dtype": "float32" if wide else "bfloat16",
        "gradient_checkpointing": False,
    }
    if not merge:
        changes["quantization"] = "none"
    model = role.model.model_copy(update=changes)
    module = load_plain(model, is_value=spec.roles["actor"].head == "value")
    if role.adapter is not None:
        add_adapter(module, role.adapter, role.model.path, spec.run.seed)
    return module


def _fill(module: nn.Module, weights: Mapping[str, Tensor], checkpoint: Path) -> None:
    """Copy the weights into the trained parameters, cast to each parameter's dtype.

    Raises ConfigError, naming the checkpoint, if names or sizes differ.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    wrong = sorted(trained.keys() ^ weights.keys()) or sorted(
        name for name, p in trained.items() if weights[name].numel() != prod(p.shape)
    )
    if wrong:
        raise ConfigError(
            f"{checkpoint} does not fit the model that its config names: {', '.join(wrong[:3])}"
            f"{' and more' if len(wrong) > 3 else ''} of another shape, or only on one side. Was "
            f"actor.model.path changed after the run?"
        )
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(weights[name].view(parameter.shape))
