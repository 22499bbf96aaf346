"""Add low-rank adapters (PEFT) to a model, switch them off, merge them, and read and write files.

PEFT wraps each layer that gets an adapter: `q_proj` then holds the frozen `q_proj.base_layer` and
trained parameters whose names begin with `lora_`. Stacked experts have Plimsoll's own adapters
(experts.py). PEFT's directories have adapter_config.json and adapter_model.safetensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from plimsoll.config.engine import ADAPTER_FILE, ALL_LINEAR, EXPERTS, AdapterConfig
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.model.checks import as_config_error
from plimsoll.model.experts import (
    PARAMETERS,
    STACKED,
    ExpertPairs,
    adapt_experts,
    from_saved,
    saved_name,
    stacked_experts,
    stacked_matrices,
    to_saved,
)
from plimsoll.model.files import (
    WRAPPER,
    Companions,
    add_older_settings,
    is_of_adapter,
    plain_name,
    published_weights,
    write_generation,
)
from plimsoll.model.policy import PolicyModel, ValueModel
from plimsoll.model.quantization import dequantise
from plimsoll.process.patterns import last_group
from plimsoll.run.files import whole_directory

ADAPTER = "default"
"""PEFT's name for a model's only adapter."""
_BASE = ".base_layer"
_PEFT = "base_model.model."
"""What PEFT's files put before the names of a model's parameters."""


def add_adapter(
    module: PolicyModel | ValueModel, config: AdapterConfig, base: str, seed: int
) -> None:
    """Add an adapter to the model, in place, and freeze all other parameters but a value head.

    `base` is the model's path or name, which the saved adapter refers to. `seed` draws the first
    weights, if they are not those of `config.path`. Raises ConfigError if a target is not a layer
    of the model, or the adapter at `config.path` is of another form.
    """
    from peft import LoraConfig

    is_value = isinstance(module, ValueModel)
    wanted = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=_targets(module.lm, config.targets),
        target_parameters=list(PARAMETERS) if EXPERTS in config.targets else None,
        use_rslora=config.rslora,
        use_dora=config.dora,
        task_type="SEQ_CLS" if is_value else "CAUSAL_LM",
        base_model_name_or_path=str(Path(base).absolute()) if Path(base).is_dir() else base,
    )
    whole = _whole_modules(module.lm, config.modules_to_save)
    saved = sorted(path.rpartition(".")[2] for path in whole) or None
    if config.path is None:
        inject(module, wanted, seed)
    else:
        directory, dtype = Path(config.path), module.lm.dtype
        wanted.modules_to_save = saved  # only compared
        _check_form(wanted, read_adapter_config(directory), directory)
        load_adapter(module, wanted, directory)
        for name, parameter in module.named_parameters():
            if is_of_adapter(name):
                parameter.data = parameter.data.to(dtype)
    # Trained where they are: PEFT would keep a frozen copy of each beside.
    for path in whole:
        module.lm.get_submodule(path).requires_grad_(True)
    module.lm.peft_config[ADAPTER].modules_to_save = saved


def _whole_modules(lm: PreTrainedModel, names: Collection[str]) -> list[str]:
    """Return the paths in the model of its embedding and head as far as they are in `names`.

    Where the two are one tensor, either name means both.
    """
    layers = {"embed_tokens": lm.get_input_embeddings(), "lm_head": lm.get_output_embeddings()}
    if names and lm.config.tie_word_embeddings and layers["lm_head"] is not None:
        names = layers
    chosen = [layers[name] for name in names]
    if None in chosen:
        raise ConfigError(
            f"adapter.modules_to_save: lm_head is nothing of {type(lm).__name__}, whose head is "
            "trained whole by itself. Leave it out."
        )
    return [path for path, layer in lm.named_modules() if any(layer is c for c in chosen)]


_FORM = ("r", "lora_alpha", "use_rslora", "use_dora", "task_type")
_SETS = ("target_modules", "target_parameters", "modules_to_save")
_FLAGS = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora", "use_dora": "dora"}


def _check_form(wanted: Any, found: Any, directory: Path) -> None:
    """Raise ConfigError if a saved adapter is of another form than the config says."""
    if found.rank_pattern or found.alpha_pattern:
        raise ConfigError(
            f"The adapter {str(directory)!r} has ranks or scales of single layers, which are not "
            "trained further here. Merge it by `plimsoll merge`, and give the result as "
            "actor.model.path."
        )
    for name in (*_FORM, *_SETS):
        own, other = getattr(wanted, name), getattr(found, name)
        same = {*(own or ())} == {*(other or ())} if name in _SETS else own == other
        if not same and name == "task_type":
            raise ConfigError(
                f"The adapter {str(directory)!r} is of another kind of model: its task_type is "
                f"{other}, and {own} is needed. Give another adapter.path."
            )
        if not same:
            key = _FLAGS.get(name, "targets" if name.startswith("target_") else name)
            value = sorted(other or ()) if name in _SETS else other
            raise ConfigError(
                f"The adapter {str(directory)!r} has {name} {value}, and the config says "
                f"otherwise. Give adapter.{key} the adapter's, or another adapter.path."
            )


def inject(module: PolicyModel | ValueModel, peft_config: Any, seed: int = 0) -> None:
    """Add an adapter to the model like `add_adapter`, from a config of PEFT."""
    from peft import inject_adapter_in_model

    dtype, lm = module.lm.dtype, module.lm
    experts, peft_config.target_parameters = peft_config.target_parameters, None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if peft_config.target_modules:
            inject_adapter_in_model(peft_config, lm, ADAPTER)
        else:  # PEFT takes no config without targets
            lm.requires_grad_(False).peft_config = {ADAPTER: peft_config}
        if stacked := peft_config.target_parameters:
            raise ConfigError(
                "adapter.targets: PEFT takes names of this model's MLPs "
                f"({type(lm).__name__}) for its stacked experts ({', '.join(sorted(stacked))}), "
                "and would compute the whole update of each expert in every forward pass. Write "
                "names of attention's layers, such as q_proj, k_proj, v_proj, o_proj, "
                "and `experts`."
            )
        if experts:
            root = peft_config.r**0.5 if peft_config.use_rslora else peft_config.r
            adapt_experts(lm, peft_config.r, peft_config.lora_alpha / root)
            peft_config.target_parameters = experts
    for name, parameter in module.named_parameters():
        if is_of_adapter(name):
            parameter.data = parameter.data.to(dtype)  # PEFT makes them fp32
    if isinstance(module, ValueModel):
        module.lm.score.requires_grad_(True)


def _targets(lm: PreTrainedModel, names: tuple[str, ...]) -> list[str]:
    """Return the names of the layers that PEFT wraps; stacked experts are not among them."""
    kinds = {
        name.rpartition(".")[2]: type(layer)
        for name, layer in lm.get_decoder().named_modules()
        if isinstance(layer, nn.Linear | nn.Embedding)
    }
    linears = sorted(name for name, kind in kinds.items() if issubclass(kind, nn.Linear))
    groups = {ALL_LINEAR, EXPERTS} if any(stacked_experts(lm)) else {ALL_LINEAR}
    unknown = [name for name in names if name not in kinds and name not in groups]
    if unknown or not names or not linears:
        raise ConfigError(
            f"adapter.targets: {', '.join(unknown) or 'none'} {'are' if len(unknown) > 1 else 'is'}"
            f" no layer of {type(lm).__name__}. Its linear layers are {', '.join(linears)}; write "
            f"some of them, or {' and '.join(f'`{group}`' for group in sorted(groups))}."
        )
    embeddings = [name for name in names if name not in {*groups, *linears}]
    if embeddings and lm.config.tie_word_embeddings:
        raise ConfigError(
            f"adapter.targets: {', '.join(embeddings)} is also the output head of this model "
            "(tie_word_embeddings), which would have to change with it. Leave it out."
        )
    return sorted({*names, *(linears if ALL_LINEAR in names else ())} - groups)


@contextmanager
def adapter_off(module: nn.Module) -> Iterator[None]:
    """During the block, switch the adapter off."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [part for part in module.modules() if isinstance(part, BaseTunerLayer | ExpertPairs)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def parts_of_weight(module: nn.Module, name: str) -> tuple[str, ...]:
    """Return the names of the parameters that `plain_weight` is computed from."""
    owner, pairs = _pairs_of(module, name)
    if pairs is not None:
        return (name, *(f"{owner}.{part}" for part, _ in pairs.named_parameters()))
    layer, base, leaf = name.rpartition(f"{_BASE}.")
    if not base or leaf != "weight":
        return (name,)
    parts = (n for n, _ in module.get_submodule(layer).named_parameters())
    return (name, *(f"{layer}.{n}" for n in parts if n.startswith("lora_")))


def plain_weight(module: nn.Module, name: str, rows: slice = slice(None)) -> Tensor:
    """Return a parameter's value dequantised and with its adapter merged in.

    If it has neither quantisation nor an adapter, the result is the parameter's own tensor. `rows`
    chooses some of the experts that the parameter stacks.
    """
    weight = dequantise(module.get_parameter(name))
    _, pairs = _pairs_of(module, name)
    if pairs is not None:
        return pairs.merge_into(weight, rows)
    layer, base, leaf = name.rpartition(f"{_BASE}.")
    if not base or leaf != "weight":
        return weight if rows == slice(None) else weight[rows]
    return _merge_into(module.get_submodule(layer), weight)


def _pairs_of(module: nn.Module, name: str) -> tuple[str, ExpertPairs | None]:
    """Return the name and module of the adapters of a stacked weight; None for another one."""
    experts, _, leaf = name.rpartition(".")
    pairs = getattr(module.get_submodule(experts), f"lora_{leaf}", None)
    return f"{experts}.lora_{leaf}", pairs if isinstance(pairs, ExpertPairs) else None


def _merge_into(layer: Any, weight: Tensor) -> Tensor:
    """Return W + s B A, Hu et al. 2021, eq. 3, computed in fp32 and rounded once to W's dtype.

    With DoRA each row is scaled to its learned magnitude, Liu et al. 2024, eq. 5.
    """
    up, down = _factors(layer)
    whole = torch.addmm(weight.float(), up.float(), down.float(), alpha=layer.scaling[ADAPTER])
    if ADAPTER in layer.lora_magnitude_vector:
        magnitude = layer.lora_magnitude_vector[ADAPTER].weight.float()
        whole *= (magnitude / whole.norm(dim=1))[:, None]
    return whole.to(weight.dtype)


def _factors(layer: Any) -> tuple[Tensor, Tensor]:
    """Return B [outputs, rank] and A [rank, inputs]; an embedding's are stored transposed."""
    if ADAPTER in layer.lora_embedding_A:
        up, down = layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER]
        return up.detach().T, down.detach().T
    return layer.lora_B[ADAPTER].weight.detach(), layer.lora_A[ADAPTER].weight.detach()


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

    `state` has the trained parameters, gathered from all ranks, by their names in the module.
    Raises PlimsollError with the path if the disk is full or not writable.
    """
    config, weights = adapter_bytes(module, saved_tensors(module, state))
    with whole_directory(directory) as partial:
        (partial / ADAPTER_FILE).write_bytes(config)
        (partial / WEIGHTS).write_bytes(weights)
        beside.tokenizer.save_pretrained(partial)
        add_older_settings(partial)
        if beside.generation is not None:
            write_generation(beside.generation, partial)


def saved_tensors(
    module: PolicyModel | ValueModel, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the trained parameters by the names and in the shapes that PEFT's files have."""
    tied = module.tied_names if isinstance(module, PolicyModel) else {}
    twice = {f"{WRAPPER}{name}": state.get(f"{WRAPPER}{of}") for name, of in tied.items()}
    whole = {name: tensor.clone() for name, tensor in twice.items() if tensor is not None}
    every = {**state, **whole}  # readers of PEFT's files need not tie them
    return {_saved_name(name): to_saved(name, tensor) for name, tensor in every.items()}


def tensors_for_engines(
    module: PolicyModel | ValueModel, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the trained parameters as vLLM takes them: experts as the model's files have them.

    Files of most families have a tensor for each expert, and gate and up apart; A of the two is
    one, so it is there twice. Source: vLLM 0.32, lora/layers/fused_moe.py, `FusedMoEWithLoRA`.
    """
    split: dict[str, Tensor] = {}
    for matrix in ("A", "B"):
        stacks = {plain_name(name): each for name, each in stacked_matrices(state, matrix)}
        files = dict(published_weights(module.lm, dict(stacks)))
        if files.keys() == stacks.keys():  # of a family whose files stack experts, too
            return saved_tensors(module, state)
        for name, tensor in files.items():
            split[f"{_PEFT}{name.removesuffix('.weight')}.lora_{matrix}.weight"] = tensor
    others = {name: t for name, t in state.items() if saved_name(name) == name}
    return saved_tensors(module, others) | split


def adapter_bytes(
    module: PolicyModel | ValueModel, tensors: Mapping[str, Tensor]
) -> tuple[bytes, bytes]:
    """Return the contents of an adapter's config file and of its weights file (safetensors)."""
    with TemporaryDirectory() as directory:
        module.lm.peft_config[ADAPTER].save_pretrained(directory)
        config = Path(directory, ADAPTER_FILE).read_bytes()
    whole = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    return config, save(whole, metadata={"format": "pt"})


def read_adapter_config(directory: Path) -> Any:
    """Return PEFT's config of a saved adapter.

    Raises ConfigError if it cannot be read, or is not plain LoRA, rsLoRA or DoRA.
    """
    from peft import PeftConfig

    if not (directory / ADAPTER_FILE).is_file():  # PEFT would ask the hub for the name
        raise ConfigError(
            f"The adapter {str(directory)!r} has no {ADAPTER_FILE}. Give a directory that PEFT "
            "or a run with an adapter has written, such as runs/NAME/model."
        )
    with as_config_error(str(directory), ADAPTER_FILE):
        config = PeftConfig.from_pretrained(str(directory))
    unsupported = [name for name in _OTHER_FORMS if getattr(config, name, None)]
    if getattr(config, "init_lora_weights", None) not in _PLAIN_STARTS:
        unsupported.append("init_lora_weights")
    if parameters := getattr(config, "target_parameters", None):
        are_experts = {str(name).rpartition(".")[2] for name in parameters} == {*STACKED}
        if not are_experts or config.rank_pattern or config.alpha_pattern:
            unsupported.append("target_parameters")
        config.target_parameters = list(PARAMETERS)
    if config.peft_type != "LORA" or unsupported:
        kind = ", ".join([str(config.peft_type), *unsupported])
        raise ConfigError(
            f"The adapter {str(directory)!r} ({kind}) is "
            "not plain LoRA, rsLoRA or DoRA; only those are supported. Merge it with PEFT's "
            "merge_and_unload."
        )
    return config


def load_adapter(module: PolicyModel | ValueModel, config: Any, directory: Path) -> None:
    """Add a saved adapter to the model that it was trained on; ConfigError if it does not fit.

    Whole weights that were saved beside it (PEFT's `modules_to_save`, and embeddings) take the
    place of the model's.
    """
    config.inference_mode = False
    config.modules_to_save = None
    with as_config_error(str(directory), WEIGHTS):
        tensors = load_file(directory / WEIGHTS)
    with as_config_error(str(directory), ADAPTER_FILE):
        _check_adapter_config(config, module, tensors)
        inject(module, config)
    _replace_whole_weights(module, tensors)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    shapes = {_saved_name(name): to_saved(name, p).shape for name, p in trained.items()}
    wrong = sorted(shapes.keys() ^ tensors.keys()) or sorted(
        name for name, shape in shapes.items() if tensors[name].shape != shape
    )
    if wrong:
        raise ConfigError(
            f"The adapter {str(directory)!r} does not fit {type(module.lm).__name__}: "
            f"{', '.join(wrong[:3])}{' and more' if len(wrong) > 3 else ''}: of another shape, or "
            "missing in one of the two. Give the model that it was trained on as the base."
        )
    for name, parameter in trained.items():
        tensor = from_saved(name, tensors[_saved_name(name)], parameter)
        parameter.data = tensor.to(parameter.device)


def _replace_whole_weights(module: PolicyModel | ValueModel, tensors: dict[str, Tensor]) -> None:
    """Move the tensors that are no adapter's to their places in the model.

    An embedding and a head that were one tensor become two if they now differ, or if only the
    embedding has an adapter. A tensor of another shape stays, but for its number of tokens.
    """
    every = dict(module.named_parameters(remove_duplicate=False))
    frozen = {_saved_name(plain_name(n)): n for n, p in every.items() if not p.requires_grad}
    places = {saved: frozen.get(saved.replace(f"{_BASE}.", ".")) for saved in tensors}
    found = {
        place: tensors.pop(saved)
        for saved, place in places.items()
        if place is not None and tensors[saved].shape[1:] == every[place].shape[1:]
    }
    embedding, head = module.lm.get_input_embeddings(), module.lm.get_output_embeddings()
    base = getattr(embedding, "base_layer", embedding)
    tokens = len(base.weight)
    tied = head is not None and getattr(head, "weight", None) is base.weight
    for place, tensor in found.items():
        owner, _, leaf = place.rpartition(".")
        weight = nn.Parameter(tensor.to(every[place].dtype), requires_grad=False)
        setattr(module.get_submodule(owner), leaf, weight)
    if tied and (embedding is not base or not torch.equal(head.weight, base.weight)):
        if head.weight is base.weight:
            head.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        module.lm.config.tie_word_embeddings = False
    elif tied:
        head.weight = base.weight
    if len(base.weight) != tokens:
        module.lm.config.get_text_config().vocab_size = len(base.weight)


def _check_adapter_config(config: Any, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError for ranks beyond the stored weights, or expressions that take too long.

    PEFT would allocate the rank's weights, and match each expression with each layer's name.
    """
    ranks = [config.r, *(config.rank_pattern or {}).values()]
    largest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    if max(ranks) > largest:
        raise ConfigError(
            f"The adapter's config has a rank of {max(ranks)}, and no side of its weights is over "
            f"{largest}. Copy the adapter again."
        )
    targets = [config.target_modules, config.exclude_modules]
    patterns = [*filter(None, targets), *config.rank_pattern, *config.alpha_pattern]
    names = "\n".join(name for name, _ in module.named_modules())
    for pattern in patterns:
        if isinstance(pattern, str):
            _match_layers(pattern, names)


def _match_layers(pattern: str, names: str) -> None:
    try:
        last_group(rf"(?m)^(?:.*\.)?({pattern})$", names)
    except PlimsollError as error:
        raise ConfigError(
            f"The adapter's config has the pattern {pattern[:200]!r}, which cannot be matched with "
            f"the names of layers: {error}. Write names of layers instead."
        ) from error


def _saved_name(name: str) -> str:
    """Return the name that PEFT's files give a trained parameter of a PolicyModel or ValueModel."""
    plain = saved_name(name.removeprefix(WRAPPER).replace(f".{ADAPTER}", ""))
    if plain.endswith("lora_magnitude_vector.weight"):
        plain = plain.removesuffix(".weight")
    return f"{_PEFT}{plain}"
