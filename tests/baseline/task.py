"""What the recorded runs learn from: tiny models and rows, drawn from fixed seeds by plain
transformers and tokenizers, so that nothing of Plimsoll's decides what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rows import row, write_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

END = "<|end|>"
SPECIAL = [END, "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
MERGES = [("Ġ", "#"), ("#", "#"), ("1", "0"), ("2", "0"), ("Ġ", "i"), ("i", "s")]
VOCABULARY = 288
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_task(home: Path) -> None:
    """Models `model` (Qwen2), `other` (Llama, surer of itself), `mixture` (Mixtral) and `judge`
    (one that scores), and the rows of every job."""
    tokenizer = make_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    qwen2 = Qwen2Config(**shape, tie_word_embeddings=True, initializer_range=0.1)
    llama = LlamaConfig(**shape, tie_word_embeddings=False, initializer_range=0.2)
    mixtral = MixtralConfig(
        **shape, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.2
    )
    judge = LlamaConfig(**shape, num_labels=1, initializer_range=0.3)
    for seed, (name, config, kind) in enumerate(
        [
            ("model", qwen2, AutoModelForCausalLM),
            ("other", llama, AutoModelForCausalLM),
            ("mixture", mixtral, AutoModelForCausalLM),
            ("judge", judge, AutoModelForSequenceClassification),
        ]
    ):
        torch.manual_seed(seed)
        kind.from_config(config, dtype=torch.float32).save_pretrained(home / name)
        tokenizer.save_pretrained(home / name)
    write_rows(home / "rows.jsonl", [row(i) for i in range(24)])
    write_rows(home / "held_out.jsonl", [row(i) for i in range(24, 32)])


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *letters, *(a + b for a, b in MERGES)]
    words += [f"<|unused {i}|>" for i in range(VOCABULARY - len(words))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    made.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    made.chat_template = TEMPLATE
    return made
