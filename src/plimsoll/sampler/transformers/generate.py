"""Parts for transformers' `generate`: the choice of a token, the end of a response; attention.

The attention is for models with fewer heads of keys than of queries, grouped-query attention
(Ainslie et al. 2023, https://arxiv.org/abs/2305.13245). It is registered with transformers'
AttentionInterface. The attention that transformers has there copies the KV cache for every head of
queries at each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    StoppingCriteria,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from plimsoll.config.rollout import SamplingConfig
from plimsoll.sampler.text import Decoder

GROUPED = "plimsoll_grouped"


def _grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention as transformers' `sdpa` computes it, without copies of keys and values.

    Query [sequences, heads, tokens, width], keys and values [sequences, key-value heads, tokens so
    far, width]; the result is [sequences, tokens, heads, width].

    If each sequence has one new token, the token sees all tokens before it, and all heads have the
    same mask. Then the queries of a group can be rows of one head, which share its keys, and
    nothing is copied.
    """
    sequences, heads, tokens, width = query.shape
    groups = key.shape[1]
    if tokens > 1 or heads == groups or options.get("position_bias") is not None:
        inputs = module, query, key, value, attention_mask, dropout, scaling
        whole: tuple[Tensor, None] = sdpa_attention_forward(*inputs, **options)
        return whole
    rows = query.reshape(sequences, groups, heads // groups, width)
    attended = scaled_dot_product_attention(
        rows, key, value, attention_mask, dropout, scale=scaling
    )
    return attended.reshape(sequences, 1, heads, width), None


AttentionInterface.register(GROUPED, _grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


class EndAtLimit(StoppingCriteria):  # type: ignore[misc]
    """A criterion that ends each response at a limit of its own."""

    def __init__(self, limits: Sequence[int], prompt_tokens: int) -> None:
        self._last = torch.tensor(limits) + prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor, **options: object) -> Tensor:
        """Return for each response whether it has reached its limit."""
        return (self._last <= input_ids.shape[1]).to(input_ids.device)


class StopStrings(StoppingCriteria):  # type: ignore[misc]
    """A criterion that ends a response in which a stop string has appeared, as vLLM does.

    The prompt's text, with which transformers' own criterion would join it, does not count.
    """

    def __init__(self, decoder: Decoder, sampling: SamplingConfig, prompt_tokens: int) -> None:
        self._decoder = decoder
        self._sampling = sampling
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor, **options: object) -> Tensor:
        """Return for each response whether it holds a stop string."""
        rows = input_ids[:, self._prompt_tokens :].cpu().numpy()
        stopped = [self._decoder.stops(row, self._sampling) for row in rows]
        return torch.tensor(stopped, device=input_ids.device)


class Recorder(LogitsProcessor):  # type: ignore[misc]
    """A processor that makes the distribution to sample from, and notes sampled tokens' log-probs.

    It sees a step's token only at the next call, so it keeps one step's log-probs at a time.
    """

    def __init__(self, sampling: SamplingConfig, prompt_tokens: int, ends: Tensor) -> None:
        self._processors = _processors(sampling, prompt_tokens, ends)
        self._temperature = sampling.temperature or 1.0
        self._last: Tensor | None = None
        self._noted: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores to sample from, and note the last token's log-prob."""
        self._note(input_ids)
        scores = scores / self._temperature
        for process in self._processors:
            scores = process(input_ids, scores)
        self._last = scores.float().log_softmax(-1)
        return scores

    def _note(self, input_ids: Tensor) -> None:
        if self._last is not None:
            self._noted.append(self._last.gather(1, input_ids[:, -1:]))

    def finish(self, output: Tensor) -> Tensor:
        """Return the log-probs of all sampled tokens, shape [sequences, steps]."""
        self._note(output)
        return torch.cat(self._noted, dim=1)


def _processors(
    sampling: SamplingConfig, prompt_tokens: int, ends: Tensor
) -> list[LogitsProcessor]:
    """Return the processors in vLLM's order (v1/sample/sampler.py).

    In another order they give another distribution.
    """
    processors: list[LogitsProcessor] = []
    if sampling.min_new_tokens and len(ends):
        least = sampling.min_new_tokens
        processors.append(MinNewTokensLengthLogitsProcessor(prompt_tokens, least, ends))
    if sampling.min_p > 0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return processors
