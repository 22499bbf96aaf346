"""Write a plain Hugging Face directory from a run's checkpoint, or from an adapter and its base.

`plimsoll export RUN|CHECKPOINT --to DIRECTORY`, for any ZeRO stage and number of ranks. The weights
are the checkpoint's fp32 master weights, or their moving average if the run keeps one. So weights
written as float32 are exact, and as bfloat16 they are those that the trainer used.

`plimsoll merge ADAPTER --out DIRECTORY` writes a third model. Every weight is computed in float32
and rounded once. An adapter that was trained with a 4-bit base (QLoRA) has also learned to correct
the base's rounding. `--quantization nf4` merges it into the dequantized values of the base, so the
merged model computes the same as the trainer did.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from plimsoll.config.engine import DecidedDtype, Dtype, ModelConfig, TrainedRole
from plimsoll.data.template import given_template, make_template
from plimsoll.errors import ConfigError
from plimsoll.model.adapters import (
    add_adapter,
    load_adapter,
    plain_weight,
    read_adapter_config,
    save_adapter,
)
from plimsoll.model.checks import as_config_error, read_model_config
from plimsoll.model.files import (
    Companions,
    companions,
    hf_state_names,
    save_hf,
    saved_buffers,
    weights_for_files,
)
from plimsoll.model.load import load_policy, load_tokenizer, load_value
from plimsoll.model.policy import PolicyModel, ValueModel
from plimsoll.model.routers import freeze_routers
from plimsoll.resolve.model_files import has_tokenizer
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.trainer.checkpoint import read_weights


def merge_adapter(
    adapter: Path, out: Path, base: str | None, *, dtype: DecidedDtype | None = None, **reading: Any
) -> bool:
    """Write the merged model as a Hugging Face directory; return whether it is a value model.

    Args:
        adapter: The directory of the adapter.
        out: The directory to write.
        base: Path or name of the base; None for the base that the adapter's config names.
        dtype: Dtype of the written weights; None for the base's, if it is one of these two,
            and else bfloat16.
        **reading: Keys of `ModelConfig` for loading the base.

    Raises ConfigError if the adapter or the base cannot be read, or do not fit each other.
    """
    config = read_adapter_config(adapter)
    named = base or config.base_model_name_or_path
    if not isinstance(named, str):
        raise ConfigError(
            f"The adapter {str(adapter)!r} does not name its base. Give the path with --base."
        )
    if dtype is None:
        of_base = read_model_config(named, reading.get("trust_remote_code", False)).dtype
        dtype = "float32" if of_base is torch.float32 else "bfloat16"
    model = ModelConfig(path=named, dtype=dtype, **reading)
    module = load_plain(model, is_value=config.task_type == "SEQ_CLS")
    load_adapter(module, config, adapter)
    beside = _companions(module, adapter, model)
    write_plain(module, getattr(torch, dtype), beside, out)
    return isinstance(module, ValueModel)


def _companions(module: PolicyModel | ValueModel, adapter: Path, base: ModelConfig) -> Companions:
    """Return the adapter's tokenizer and generation settings, or the base's if it has none."""
    has_own = has_tokenizer(str(adapter))
    source, trust = str(adapter) if has_own else base.path, base.trust_remote_code
    tokenizer = load_tokenizer(source, trust)
    if has_own and not tokenizer.chat_template:
        tokenizer.chat_template = load_tokenizer(base.path, trust).chat_template
    files = companions(module.lm, tokenizer, "none")
    if files.generation is None or not (adapter / GENERATION_CONFIG_NAME).is_file():
        return files
    with as_config_error(str(adapter), GENERATION_CONFIG_NAME):
        return replace(files, generation=GenerationConfig.from_pretrained(adapter))


def write_plain(
    module: PolicyModel | ValueModel,
    dtype: torch.dtype,
    beside: Companions,
    out: Path,
    chat_template: str | None = None,
) -> None:
    """Write a model as a Hugging Face directory, without adapters and quantization.

    Args:
        module: The model. Its weights do not change: merged weights are copies.
        dtype: Dtype of the written weights.
        beside: Tokenizer and generation settings to write.
        out: The directory to write.
        chat_template: As `data.chat_template`; for the padding token of a value model.
    """
    names = hf_state_names(module)
    state = {name: plain_weight(module, key).to(dtype) for key, name in names.items()}
    state |= saved_buffers(module)
    config = deepcopy(module.lm.config)
    if isinstance(module, ValueModel):
        config.get_text_config().pad_token_id = padding_token(beside.tokenizer, chat_template)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    save_hf(config, weights_for_files(module.lm, state), beside.tokenizer, out, beside.generation)


def padding_token(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> int | None:
    """Return the id of the token that pads a sequence classifier's input, or None.

    It is the tokenizer's padding token, unless this token also ends a sequence or a turn:
    transformers reads no score at padding. With None transformers accepts only one sequence at a
    time. `chat_template` has the form of `data.chat_template`.
    """
    ends = {tokenizer.eos_token}
    if chat_template != "none" and (chat_template or tokenizer.chat_template):
        ends.add(make_template(tokenizer, chat_template, None).turn_end())
    token: int | None = tokenizer.pad_token_id
    return None if tokenizer.pad_token in ends else token


def load_plain(model: ModelConfig, *, is_value: bool) -> PolicyModel | ValueModel:
    """Return a model loaded into host memory, with attention and kernels that a CPU can run."""
    cpu = torch.device("cpu")
    model = model.model_copy(update={"attention": "sdpa", "kernels": "own"})
    return load_value(model, cpu, seed=0) if is_value else load_policy(model, cpu)


def export_checkpoint(
    checkpoint: Path, spec: RunSpec[Any], to: Path, dtype: Dtype | None, *, merge: bool
) -> None:
    """Write the actor of a checkpoint to the directory `to`.

    Args:
        checkpoint: The checkpoint.
        spec: The spec of its run.
        to: The directory to write.
        dtype: Dtype of the written weights; None for the run's.
        merge: Whether to merge an adapter into its base. If not, an adapter is written in PEFT's
            format.

    Raises ConfigError if the checkpoint does not fit the model that its config names.
    """
    role = spec.actor
    kind = "master" if role.ema is None else "average"
    weights = read_weights(checkpoint / "actor", kind)
    dtype = dtype or role.model.dtype
    module = _load(spec, dtype, merge=merge)
    _fill(module, weights, checkpoint)
    tokenizer = load_tokenizer(role.model.path, role.model.trust_remote_code)
    beside = companions(module.lm, tokenizer, given_template(spec.data))
    if role.adapter is None or merge:
        write_plain(module, getattr(torch, dtype), beside, to, spec.data.chat_template)
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
    if role.freeze == "router":
        freeze_routers(module)
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
