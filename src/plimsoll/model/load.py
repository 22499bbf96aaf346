"""Load a model that is ready for packs from a Hugging Face directory or hub name.

Unsuitable models are refused before any weight is read: `checks.py` has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import cached_file, logging

from plimsoll.config.base import AUTO
from plimsoll.config.engine import ModelConfig
from plimsoll.config.json_text import parse_json
from plimsoll.errors import ConfigError
from plimsoll.model import checks, fused
from plimsoll.model.attention import SDPA, VARLEN, register_packed_attention
from plimsoll.model.checkpointing import checkpoint_layers
from plimsoll.model.checks import check_frame, read_model_config
from plimsoll.model.cpu import use_cpu_kernels
from plimsoll.model.files import TOKENIZER_CONFIG, TOKENS, adds_ends
from plimsoll.model.fused import fuse
from plimsoll.model.logit_chunks import LogitForm
from plimsoll.model.policy import HeadForm, PolicyModel, TeacherModel, ValueModel, initialise_score
from plimsoll.model.quantization import leave_files, multiply_by_codes, quantization_settings
from plimsoll.model.tiling import tile_mlps
from plimsoll.resolve.decisions import against_varlen
from plimsoll.shapes.known_models import heads_of

_MAY_LACK: Mapping[str, bool] = MappingProxyType(
    {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
        "_raise_exceptions_for_gated_repo": False,
    }
)
_UNLIKE = "Hello world,  I'll say 1234567\n\n\tif x == 1:\r\n naïve 日本語 🙂 ABCdef's 3.14 "
"""A text of which pre-tokenizers make different parts."""


def fusions_of(kernels: str) -> tuple[fused.Fusion, ...]:
    """Return the fusions of the setting `kernels`; ConfigError if Liger cannot be imported."""
    if kernels == "own":
        return fused.FUSIONS
    assert kernels == "liger", "of a run that is resolved"
    try:
        from plimsoll.model.liger import FUSIONS
    except ImportError as error:
        raise ConfigError(
            f"liger-kernel cannot be imported: {error}. Norms and MLPs on cards "
            "compute by it. Install it with Triton (`pip install liger-kernel triton`), or "
            "write model.kernels: own for Plimsoll's functions."
        ) from error
    return FUSIONS


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model; ConfigError if its files are missing or broken."""
    checks.check_tokenizer_files(path)
    with checks.as_config_error(path, "tokenizer"):
        # tokenizer.json alone defines a tokenizer of a generic class. AutoTokenizer would
        # replace its pre-tokenizer by the model family's, and could split text differently.
        if checks.has_generic_tokenizer(path):
            return _load_as_file(path, {})
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code
        )
        # So do classes of families, such as Llama's of a byte-level DeepSeek-R1-Distill-Llama.
        file = cached_file(path, TOKENS, **_MAY_LACK) if tokenizer.is_fast else None
        if file is not None and _splits_otherwise(tokenizer, Tokenizer.from_file(file)):
            settings = cached_file(path, TOKENIZER_CONFIG)
            return _load_as_file(path, parse_json(Path(settings).read_bytes()))
    return tokenizer


def _load_as_file(path: str, settings: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of tokenizer.json, with the ends that its family's class adds."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(path)
    if adds_ends(settings):
        tokenizer.add_bos_token = settings.get("add_bos_token", True)
        tokenizer.add_eos_token = settings.get("add_eos_token", False)
    return tokenizer


def _splits_otherwise(tokenizer: PreTrainedTokenizerBase, of_file: Tokenizer) -> bool:
    """Return whether a tokenizer gives other tokens for a text than its tokenizer.json does."""
    text = " ".join([_UNLIKE, *map(str, tokenizer.all_special_tokens[:1]), "a"])
    backend: Tokenizer = tokenizer.backend_tokenizer
    own, found = (t.encode(text, add_special_tokens=False).ids for t in (backend, of_file))
    return bool(own != found)


def load_policy(
    config: ModelConfig, device: torch.device, temperature: float = 1.0, *, cast: bool = True
) -> PolicyModel:
    """Return a causal language model whose log-probabilities are those at the sampling temperature.

    The model is prepared for the device, but still in host memory. It is in training mode, which
    gradient checkpointing needs; models with dropout are refused. Without `cast` the weights stay
    mapped from the checkpoint's files, in the files' dtype, and the caller casts them one by one.
    Raises ConfigError if a check of `checks.py` fails, before weights are read.
    """
    lm, form = _load_causal(config, device, cast)
    return PolicyModel(lm, HeadForm(config.head_chunk, form, temperature))


def load_teacher(config: ModelConfig, device: torch.device) -> TeacherModel:
    """Return a causal language model as a teacher, prepared for the device.

    Its weights stay mapped from the files, as without `cast` in `load_policy`. Raises ConfigError
    as `load_policy` does.
    """
    return TeacherModel(*_load_causal(config, device, cast=False))


def _load_causal(
    config: ModelConfig, device: torch.device, cast: bool
) -> tuple[PreTrainedModel, LogitForm]:
    hf_config = read_model_config(config.path, config.trust_remote_code)
    scale, softcap = checks.logit_scale(config.path, hf_config), checks.logit_softcap(hf_config)
    lm, rows, _ = _load(AutoModelForCausalLM, hf_config, config, device, set(), cast)
    return lm, LogitForm(scale, softcap, rows)


def load_value(
    config: ModelConfig, device: torch.device, seed: int | None, *, cast: bool = True
) -> ValueModel:
    """Return a decoder with a value head, prepared for the device, but still in host memory.

    `seed` draws the head if the checkpoint has no `score.weight`. With None the checkpoint must
    have one, as a trained reward model has. `cast` and errors are as for `load_policy`.
    """
    hf_config = read_model_config(config.path, config.trust_remote_code)
    hf_config.num_labels = 1
    lm, _, absent = _load(
        AutoModelForSequenceClassification,
        hf_config,
        config,
        device,
        set() if seed is None else {"score.weight"},
        cast,
    )
    if absent:
        assert seed is not None
        initialise_score(lm.score, seed)
    return ValueModel(lm)


def attention_name(config: ModelConfig, hf_config: PreTrainedConfig, device: torch.device) -> str:
    """Return the registered name of the config's attention; ConfigError if varlen cannot run."""
    if config.attention == "sdpa":
        return SDPA
    assert config.attention == "varlen", "of a run that is resolved"
    if obstacles := list(_against_varlen(config, hf_config, device)):
        raise ConfigError(
            f"model.attention is varlen, which cannot compute this model: {'; '.join(obstacles)}. "
            "Write `attention: sdpa`."
        )
    return VARLEN


def _against_varlen(
    config: ModelConfig, hf_config: PreTrainedConfig, device: torch.device
) -> Iterator[str]:
    text = hf_config.get_text_config()
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    # Families with other names for these two translate them as attributes alone.
    sizes = {name: getattr(text, name, None) for name in ("hidden_size", "num_attention_heads")}
    heads = heads_of(text.to_dict() | sizes)
    keys, values = heads.keys or 0, heads.values or 0
    yield from against_varlen(device.type, capability, config.dtype, heads.softcapped, keys)
    if values != keys:
        yield f"its keys and values must be as wide, and the model's have {keys} and {values}"


def _load(
    auto_class: Any,
    hf_config: PreTrainedConfig,
    config: ModelConfig,
    device: torch.device,
    may_be_new: set[str],
    cast: bool,
) -> tuple[PreTrainedModel, int, set[str]]:
    """Return the model, the result of `prepare_layers`, and the names that the checkpoint lacks.

    The model is first checked without weights; then its weights are mapped from the checkpoint's
    files. Mapping costs page cache, which all ranks of a machine share; only a cast copies weights
    into memory. The checkpoint may lack only the names in `may_be_new`.
    """
    register_packed_attention()
    attention = attention_name(config, hf_config, device)
    check_frame(config, hf_config, auto_class)
    with (
        quiet(),
        checks.as_config_error(config.path, "weights"),
        torch.random.fork_rng(devices=[]),
    ):
        lm, report = auto_class.from_pretrained(
            config.path,
            config=hf_config,
            dtype=getattr(torch, config.dtype) if cast or config.quantization != "none" else AUTO,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused by `check_loaded`
            **quantization_settings(config, device),
        )
    checks.check_loaded(config.path, report, may_be_new)
    lm.config.architectures = [type(lm).__name__]
    multiply_by_codes(lm)
    if config.quantization != "none" and device.type == "cpu":
        leave_files(lm)
    rows = prepare_layers(lm, config, device)
    return lm.train(), rows, set(report["missing_keys"])


def prepare_layers(lm: PreTrainedModel, config: ModelConfig, device: torch.device) -> int:
    """Set up a model's layers, in place: kernels for its device, tiles, gradient checkpointing.

    Return the result of `use_cpu_kernels`. The model may be loaded, or be without weights for
    tracing. Raises ConfigError as `fusions_of`, `tile_mlps` and `checkpoint_layers` do.
    """
    fuse(lm, fusions_of(config.kernels))
    tile_mlps(lm, config)
    rows = use_cpu_kernels(lm, device)
    checkpoint_layers(lm, config)
    return rows


@contextmanager
def quiet() -> Iterator[None]:
    """During the block, hide progress bars and transformers' table of missing weights."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
