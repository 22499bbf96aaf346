"""From a directory in Hugging Face format (or a hub name) to a model that is ready for packs.

What cannot work is refused before any weight is read: `checks.py` has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from plimsoll.config.model import ModelConfig
from plimsoll.errors import ConfigError
from plimsoll.model import checks
from plimsoll.model.attention import SDPA, VARLEN, register_packed_attention
from plimsoll.model.policy import HeadForm, PolicyModel
from plimsoll.model.value import ValueModel, initialise_score


def read_model_config(path: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model's config.json, without its weights.

    Raises ConfigError when there is no such directory, no readable config.json, or an encoder.
    """
    return checks.read_config(path, trust_remote_code)


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model; ConfigError when its files are missing or broken."""
    checks.check_tokenizer_files(path)
    # A tokenizer that calls itself generic is what its tokenizer.json says. AutoTokenizer would
    # replace its pre-tokenizer by the model family's, and could silently split text differently.
    kind = PreTrainedTokenizerFast if checks.has_generic_tokenizer(path) else AutoTokenizer
    with checks.as_config_error(path, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(
            path, trust_remote_code=trust_remote_code
        )
    return tokenizer


def load_policy(config: ModelConfig, device: torch.device, temperature: float = 1.0) -> PolicyModel:
    """Load a causal language model whose log-probabilities are those at the temperature.

    In training mode (gradient checkpointing needs it; models with dropout are refused).
    Raises ConfigError, before weights are read, for everything in `checks.py`.
    """
    if temperature <= 0:
        raise ConfigError(
            f"temperature is {temperature}: greedy sampling has no log-probabilities to train on. "
            "Sample for training with a temperature above 0."
        )
    hf_config = read_model_config(config.path, config.trust_remote_code)
    form = HeadForm(
        chunk=config.head_chunk,
        scale=checks.logit_scale(config.path, hf_config),
        softcap=checks.logit_softcap(hf_config),
        temperature=temperature,
    )
    lm, _ = _load(AutoModelForCausalLM, hf_config, config, device, may_be_new=set())
    return PolicyModel(lm, form)


def load_value(config: ModelConfig, device: torch.device, seed: int) -> ValueModel:
    """Load a decoder as a value function; a checkpoint without `score.weight` gets a new one.

    The seed decides the new head. Raises ConfigError as `load_policy`.
    """
    hf_config = read_model_config(config.path, config.trust_remote_code)
    hf_config.num_labels = 1
    lm, absent = _load(
        AutoModelForSequenceClassification, hf_config, config, device, {"score.weight"}
    )
    if absent:
        initialise_score(lm.score, seed)
    return ValueModel(lm)


def attention_name(config: ModelConfig, hf_config: PreTrainedConfig, device: torch.device) -> str:
    """The registered attention that `config.attention` means for this model and device.

    auto takes varlen wherever it can compute the model; asking for varlen elsewhere is refused.
    """
    if config.attention == "sdpa":
        return SDPA
    obstacle = _against_varlen(config, hf_config, device)
    if config.attention == "varlen" and obstacle:
        raise ConfigError(
            f"model.attention is varlen, but {obstacle}. Write `attention: sdpa`, or `auto`."
        )
    return SDPA if obstacle else VARLEN


def _against_varlen(
    config: ModelConfig, hf_config: PreTrainedConfig, device: torch.device
) -> str | None:
    settings = hf_config.to_dict()
    if device.type != "cuda":
        return f"PyTorch's varlen_attn runs on CUDA, and this is {device.type}"
    if config.dtype != "bfloat16":
        return f"varlen_attn computes in bfloat16, and model.dtype is {config.dtype}"
    if settings.get("attn_logit_softcapping"):
        return f"{hf_config.model_type} caps its attention scores, which varlen_attn cannot"
    if (settings.get("head_dim") or 0) > 256:
        return f"varlen_attn has heads of at most 256 dimensions, not {settings['head_dim']}"
    return None


def _load(
    auto_class: Any,
    hf_config: PreTrainedConfig,
    config: ModelConfig,
    device: torch.device,
    may_be_new: set[str],
) -> tuple[PreTrainedModel, set[str]]:
    """Check a frame without weights, then read them: on the CPU, in the wanted dtype, moved once.

    may_be_new: the only names that the checkpoint may lack; gives those that it does lack.
    """
    register_packed_attention()
    attention = attention_name(config, hf_config, device)
    checks.check_weight_files(config.path)
    checks.check_frame(config, hf_config, auto_class)
    with (
        quiet(),
        checks.as_config_error(config.path, "weights"),
        torch.random.fork_rng(devices=[]),
    ):
        lm, report = auto_class.from_pretrained(
            config.path,
            config=hf_config,
            dtype=getattr(torch, config.dtype),
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused by `check_loaded`
        )
    checks.check_loaded(config.path, report, may_be_new)
    lm.config.architectures = [type(lm).__name__]
    if config.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return lm.to(device).train(), set(report["missing_keys"])


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bar and no table of absent names: `check_loaded` judges them."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
