"""Read and write adapters as PEFT's directories: adapter_config.json, adapter_model.safetensors."""

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
"""Values of PEFT's init_lora_weights that leave the base unchanged."""
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
    """Write a PEFT directory, whole or not at all, in place of an existing one.

    `state` has the trained parameters, whole, by their names in the module. Raises PlimsollError
    with the path if the disk is full or not writable.
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
    """Return the contents of the config file and of the weights file."""
    tensors = {_saved_name(name): tensor.contiguous().cpu() for name, tensor in state.items()}
    with TemporaryDirectory() as directory:
        module.lm.peft_config[ADAPTER].save_pretrained(directory)
        config = Path(directory, ADAPTER_FILE).read_bytes()
    return config, save(tensors, metadata={"format": "pt"})


def read_adapter_config(directory: Path) -> Any:
    """Return PEFT's config of a saved adapter; ConfigError if it cannot be read or merged."""
    from peft import PeftConfig

    with as_config_error(str(directory), ADAPTER_FILE):
        config = PeftConfig.from_pretrained(str(directory))
    unsupported = [name for name in _OTHER_FORMS if getattr(config, name, None)]
    if getattr(config, "init_lora_weights", None) not in _PLAIN_STARTS:
        unsupported.append("init_lora_weights")
    if config.peft_type != "LORA" or unsupported:
        raise ConfigError(
            f"The adapter {str(directory)!r} ({', '.join([config.peft_type, *unsupported])}) is "
            "not plain LoRA, rsLoRA or DoRA; only those are supported. Merge it with PEFT's "
            "merge_and_unload."
        )
    return config


def load_adapter(module: PolicyModel | ValueModel, config: Any, directory: Path) -> None:
    """Put a saved adapter into the model that it was trained on; ConfigError if it does not fit."""
    config.inference_mode = False
    config.modules_to_save = None
    inject(module, config)
    parameters = {_saved_name(n): p for n, p in module.named_parameters() if p.requires_grad}
    with as_config_error(str(directory), WEIGHTS):
        tensors = load_file(directory / WEIGHTS)
    wrong = sorted(parameters.keys() ^ tensors.keys()) or sorted(
        name for name in parameters if parameters[name].shape != tensors[name].shape
    )
    if wrong:
        raise ConfigError(
            f"The adapter {str(directory)!r} does not fit {type(module.lm).__name__}: "
            f"{', '.join(wrong[:3])}{' and more' if len(wrong) > 3 else ''}: of another shape, or "
            "missing in one of the two. Give the model that it was trained on as the base."
        )
    for name, parameter in parameters.items():
        parameter.data = tensors[name]


def _saved_name(name: str) -> str:
    """Return PEFT's name in files for a trained parameter of a PolicyModel or ValueModel."""
    plain = name.removeprefix(WRAPPER).replace(f".{ADAPTER}", "")
    if plain.endswith("lora_magnitude_vector.weight"):
        plain = plain.removesuffix(".weight")
    return f"base_model.model.{plain}"
