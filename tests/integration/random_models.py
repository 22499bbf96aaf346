"""Random models that like some tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from plimsoll.model.tiny import tiny_config, write_tiny_model


def write_random_model(
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    liked: Sequence[int],
    how_much: float = 4.0,
) -> None:
    """Weights ten times as large as such models have, so that what comes before matters.

    liked: tokens that have this logit on the average over all tokens before; others have 0.
    """
    config = tiny_config("qwen2", False, vocab=vocabulary, heads=2, feed_forward=96)
    config.initializer_range = 0.2
    write_tiny_model(directory, config, 0, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        mean = model.model(torch.arange(vocabulary)[None]).last_hidden_state[0].mean(0)
        model.lm_head.weight[[*liked]] = how_much * mean / mean.norm() ** 2
    model.save_pretrained(directory)
