"""Adapters as PEFT's directories: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor

from plimsoll.config.engine import ADAPTER_FILE
from plimsoll.errors import ConfigError
from plimsoll.model.adapters import ADAPTER, inject
from plimsoll.model.checks import as_config_error
from plimsoll.model.policy import WRAPPER, Companions, PolicyModel, write_generation
from plimsoll.model.value import ValueModel
from plimsoll.run.files import whole_directory

WEIGHTS = "adapter_model.safetensors"
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of PEFT's init_lora_weights that leave the base as it is."""
_OTHER_FORMS = (
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "velora_config",
)
"""Settings of PEFT under which a weight is not W + s B A."""


def save_adapter(
    module: PolicyModel | ValueModel,
    state: Mapping[str, Tensor],
    beside: Companions,
    directory: Path,
) -> None:
    """Write a PEFT directory, whole or not at all; one that is there is replaced.

    state: the trained parameters, whole, by their names in the module.

    Raises PlimsollError with the path where the disk is full or not writable.
    """
    config, weights = adapter_bytes(module, state)
    with whole_directory(directory) as partial:
        (partial / ADAPTER_FILE).write_bytes(config)
        (partial / WEIGHTS).write_bytes(weights)
        beside.tokenizer.save_pretrained(partial)
        if beside.generation is not None:
            write_generation(beside.generation, partial)


def adapter_bytes(
    module: PolicyModel | ValueModel, state: Mapping[str, Tensor]
) -> tuple[bytes, bytes]:
    """What `save_adapter` writes: the config, and the weights."""
    tensors = {_saved_name(name): tensor.contiguous().cpu() for name, tensor in state.items()}
    with TemporaryDirectory() as directory:
        module.lm.peft_config[ADAPTER].save_pretrained(directory)
        config = Path(directory, ADAPTER_FILE).read_bytes()
    return config, save(tensors, metadata={"format": "pt"})


def read_adapter_config(directory: Path) -> Any:
    """PEFT's config of a saved adapter.

    Raises:
        ConfigError: it cannot be read, or is of a form that is not merged.
    """
    from peft import PeftConfig

    with as_config_error(str(directory), ADAPTER_FILE):
        config = PeftConfig.from_pretrained(str(directory))
    odd = [name for name in _OTHER_FORMS if getattr(config, name, None)]
    if getattr(config, "init_lora_weights", None) not in _PLAIN_STARTS:
        odd.append("init_lora_weights")
    if config.peft_type != "LORA" or odd:
        raise ConfigError(
            f"The adapter {str(directory)!r} ({config.peft_type}{''.join(f', {n}' for n in odd)}) "
            "is not plain LoRA, rsLoRA or DoRA; only those are known. Merge it with PEFT's "
            "merge_and_unload."
        )
    return config


def load_adapter(module: PolicyModel | ValueModel, config: Any, directory: Path) -> None:
    """Put a saved adapter into the model that it was trained on.

    Raises:
        ConfigError: the tensors of the file are not those that its config and the model ask for.
    """
    config.inference_mode = False
    config.modules_to_save = None
    inject(module, config)
    own = {_saved_name(n): p for n, p in module.named_parameters() if p.requires_grad}
    with as_config_error(str(directory), WEIGHTS):
        given = load_file(directory / WEIGHTS)
    wrong = sorted(own.keys() ^ given.keys()) or sorted(
        name for name in own if own[name].shape != given[name].shape
    )
    if wrong:
        raise ConfigError(
            f"The adapter {str(directory)!r} does not fit {type(module.lm).__name__}: "
            f"{', '.join(wrong[:3])}{' and more' if len(wrong) > 3 else ''} of another shape, or "
            "only on one side. Give the model that it was trained on as the base."
        )
    for name, parameter in own.items():
        parameter.data = given[name]


def _saved_name(name: str) -> str:
    """What PEFT's files call a trained parameter of a PolicyModel or ValueModel."""
    plain = name.removeprefix(WRAPPER).replace(f".{ADAPTER}", "")
    if plain.endswith("lora_magnitude_vector.weight"):
        plain = plain.removesuffix(".weight")
    return f"base_model.model.{plain}"
