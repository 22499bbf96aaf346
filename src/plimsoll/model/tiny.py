"""Small random models in Hugging Face format, and tokenizers, for tests, the demo and examples."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2Tokenizer,
)

from plimsoll.model.files import save_hf

CHAT_TEMPLATE = r"""\
{%- if tools %}{{ '<|im_start|>system\nTools:' }}
{%- for tool in tools %}
{{- '\n' ~ tool.function.name ~ '(' ~ (tool.function.parameters.properties | join(', ')) ~ '): ' }}
{{- tool.function.description }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>' ~ message.content ~ '</tool_response>' }}
{%- else %}{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- (call.function.arguments | tojson) ~ '}</tool_call>' }}
{%- endfor %}
{%- endif %}{{ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""ChatML, with calls of tools as Hermes and Qwen 2.5 write them.

A tool answers as a user, and is described in one line, for models that cannot read a JSON schema.
"""
_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

Family = Literal["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "gpt_oss"]


def tiny_config(
    family: Family,
    tied: bool,
    *,
    vocab: int = 256,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    feed_forward: int = 128,
    window: int | None = None,
    max_positions: int = 4096,
) -> PreTrainedConfig:
    """Return the config of a small decoder of a family.

    If `tied` is set, the output head is the embedding. A sliding-window layer sees `window` tokens;
    None for no window. All layers of Mistral have a window, and every second layer of the other
    families that have windows; Llama, Qwen3 and Gemma ignore it. Each token of gpt-oss passes 2 of
    4 experts.
    """
    common: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": feed_forward,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    head = {"head_dim": hidden // heads}
    alternate = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
    gemma = {
        **head,
        "query_pre_attn_scalar": hidden // heads,
        "layer_types": alternate,
        "sliding_window": window or max_positions,
    }
    sliding = {"use_sliding_window": True, "sliding_window": window, "layer_types": alternate}
    family_fields: dict[Family, dict[str, Any]] = {
        "qwen2": {} if window is None else sliding,
        "qwen3": head,
        "mistral": {**head, "sliding_window": window},
        "gemma": head,
        "gemma2": gemma,
        "gemma3": gemma,
        "gpt_oss": {
            **head,
            "layer_types": alternate,
            "sliding_window": window or max_positions,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    }
    model_type = "gemma3_text" if family == "gemma3" else family
    fields = common | family_fields.get(family, {})
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **fields)
    return config


def write_tiny_model(
    directory: Path,
    config: PreTrainedConfig,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Draw random weights from the seed and write them as a Hugging Face directory.

    The tokenizer's special tokens go into the config, so that engines know where to stop.
    """
    if tokenizer is not None:
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.architectures = [type(model).__name__]
    save_hf(model.config, model.state_dict(), tokenizer, directory)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Qwen2Tokenizer:
    """Return a byte-level BPE tokenizer of the texts, with a token that ends a response.

    It is Qwen2's own, trained anew: transformers loads that class for every Qwen2-shaped model,
    with its way to cut text into words (each digit by itself), whatever was saved.
    """
    tokenizer: Qwen2Tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        texts, vocabulary, show_progress=False
    )
    return tokenizer


def train_chat_tokenizer(texts: Iterable[str], vocabulary: int) -> Qwen2Tokenizer:
    """Return a tokenizer like `train_tokenizer`'s, with `CHAT_TEMPLATE`; <|im_end|> ends a turn."""
    tokenizer: Qwen2Tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        texts,
        vocabulary - len(_MARKS),
        new_special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.add_tokens([*_MARKS])
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_scratch_model(
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocabulary: int,
    hidden: int,
    layers: int,
    seed: int,
) -> None:
    """Write a Qwen2-shaped model with random weights and a tied head, to learn from nothing."""
    config = tiny_config(
        "qwen2",
        tied=True,
        vocab=vocabulary,
        hidden=hidden,
        layers=layers,
        heads=8,
        kv_heads=4,
        feed_forward=hidden * 11 // 4,
        max_positions=1024,
    )
    write_tiny_model(directory, config, seed, tokenizer)


def write_chat_model(directory: Path, texts: Iterable[str], seed: int) -> None:
    """Write a Qwen2-shaped chat model of about 0.6M parameters with random weights and a tied head.

    Its tokenizer is `train_chat_tokenizer`'s. Weights start larger than usual: so small a model
    then learns to copy in half as many steps.
    """
    tokenizer = train_chat_tokenizer(texts, 448)
    config = tiny_config(
        "qwen2",
        tied=True,
        vocab=len(tokenizer),
        hidden=128,
        layers=3,
        feed_forward=384,
        max_positions=1024,
    )
    config.initializer_range = 0.05
    write_tiny_model(directory, config, seed, tokenizer)
