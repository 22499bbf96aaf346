"""Speculative decoding of vLLM: the proposer of tokens, and the parts that the plan prices.

Read in vLLM 0.32 (config/speculative.py, v1/spec_decode/draft_model.py,
v1/worker/gpu/spec_decode/standalone_ar/speculator.py): a draft model is a second model beside the
policy. It has its own weights, in the engine's dtype, and its own KV cache for the same tokens.
Both come out of the engine's share and are divided like the policy's. N-grams and suffixes need no
model: they propose tokens from the text itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from plimsoll.config.base import AUTO
from plimsoll.config.problems import show
from plimsoll.errors import ConfigError
from plimsoll.sampler.vllm.config import VllmConfig
from plimsoll.shapes.known_models import read_shape
from plimsoll.shapes.shape import ModelShape

CACHE_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1, "bfloat16": 2, "float16": 2}
"""Bytes of a number in the KV cache, by vLLM's `kv_cache_dtype`."""

_SECTION = "speculative_config"
_SHORT = {"method": "spec_method", "model": "spec_model", "num_speculative_tokens": "spec_tokens"}
"""Settings that vLLM also takes as arguments of their own."""

_DRAFT_MODEL = "draft_model"
FROM_TEXT = ("ngram", "ngram_gpu", "suffix")
"""Methods without a model."""
_DEPTH = 24
"""Tokens that suffixes propose at most: SpeculativeConfig.suffix_decoding_max_tree_depth."""
_BY_NAME = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""Methods that vLLM reads from a part of a model's name."""


@dataclass(frozen=True)
class Speculation:
    """The proposer of tokens beside the model, as far as the plan prices it.

    Attributes:
        tokens: how many are proposed at once for each sequence.
        draft: the shape of the model that proposes them; None without such a model.
        draft_cache: vLLM's `kv_cache_dtype` of the draft's KV cache; None: the engine's.
        keeps_logits: whether the draft's logits are kept until its tokens are verified.
    """

    tokens: int = 0
    draft: ModelShape | None = None
    draft_cache: str | None = None
    keeps_logits: bool = False


def speculation_of(vllm: VllmConfig) -> Speculation:
    """Return the part of the engine's speculative decoding that is priced."""
    settings, method = _speculative_settings(vllm.arguments), proposer(vllm)
    if method is None or [*unpriced_speculation(vllm)]:
        return Speculation()
    depth = settings.get("suffix_decoding_max_tree_depth", _DEPTH)
    default = depth if method == "suffix" else 0
    tokens, cache = settings.get("num_speculative_tokens", default), settings.get("kv_cache_dtype")
    count = tokens if isinstance(tokens, int) else 0
    if method != _DRAFT_MODEL:
        return Speculation(count)
    keeps_logits = settings.get("draft_sample_method") == "probabilistic"
    draft = read_shape(str(settings["model"]))
    return Speculation(count, draft, cache if isinstance(cache, str) else None, keeps_logits)


def proposer(vllm: VllmConfig) -> str | None:
    """Return vLLM's name of the method that proposes tokens; None without one."""
    settings = _speculative_settings(vllm.arguments)
    return _method(settings) if settings else None


def is_exact(vllm: VllmConfig) -> bool:
    """Return whether accepted tokens are distributed as the policy samples them.

    vLLM's `synthetic` verification accepts at given rates, whatever the policy says.
    """
    settings = _speculative_settings(vllm.arguments)
    return settings.get("rejection_sample_method") != "synthetic"


def draft_model(vllm: VllmConfig) -> tuple[str, str] | None:
    """Return the key that gives a draft model, and its path; None without one."""
    path = _speculative_settings(vllm.arguments).get("model")
    if proposer(vllm) != _DRAFT_MODEL or not isinstance(path, str):
        return None
    return f"rollout.vllm.arguments.{_key(vllm.arguments, 'model')}", path


def unpriced_speculation(vllm: VllmConfig) -> Iterator[str]:
    """Yield the settings of speculative decoding that the plan does not count, as `key: value`.

    The keys are those under `rollout.vllm.arguments`.
    """
    settings, method = _speculative_settings(vllm.arguments), proposer(vllm)
    if method is None or method in FROM_TEXT:
        return
    if method != _DRAFT_MODEL:
        yield _key_value(vllm.arguments, "method", method)
        return
    if not _is_known(settings.get("model")):
        yield _key_value(vllm.arguments, "model", settings.get("model"))
    counted: Mapping[str, tuple[object, ...]] = {
        "quantization": (None,),
        "kv_cache_dtype": (None, AUTO, *CACHE_BYTES),
        "draft_tensor_parallel_size": (None, vllm.tensor_parallel),
    }
    for name, values in counted.items():
        if settings.get(name) not in values:
            yield _key_value(vllm.arguments, name, settings[name])


def _speculative_settings(arguments: Mapping[str, object]) -> dict[str, object]:
    section = arguments.get(_SECTION)
    given = section if isinstance(section, dict) else {}
    settings = {str(name).replace("-", "_"): value for name, value in given.items()}
    return settings | {n: arguments[short] for n, short in _SHORT.items() if short in arguments}


def _method(settings: Mapping[str, object]) -> str:
    """Return the method; if it is not given, infer it as vLLM does."""
    given, model = settings.get("method"), str(settings.get("model") or "")
    if given is None and model.strip("[]") == "ngram":
        return "ngram"
    if given is None and "." in model and all(map(str.isidentifier, model.split("."))):
        return "custom_class"  # by its import path
    if given not in (None, _DRAFT_MODEL):
        return str(given)
    named = (method for part, method in _BY_NAME.items() if part in model.lower())
    return next(named, _DRAFT_MODEL)


def _is_known(model: object) -> bool:
    """Return whether the shape of a draft model can be read; if not, vLLM says what is wrong."""
    try:
        read_shape(str(model))
    except ConfigError:
        return False
    return True


def _key_value(arguments: Mapping[str, object], name: str, value: object) -> str:
    return f"{_key(arguments, name)}: {show(value)}"


def _key(arguments: Mapping[str, object], name: str) -> str:
    """Return the key under `rollout.vllm.arguments`, as it is written there."""
    short = _SHORT.get(name, "")
    return short if short in arguments else f"{_SECTION}.{name}"
