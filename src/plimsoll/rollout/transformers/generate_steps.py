"""What is done at every step of transformers' `generate`: how a token is drawn, with which
log-prob, and which responses end with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    StoppingCriteria,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from plimsoll.config.rollout import SamplingConfig
from plimsoll.rollout.text import Decoder


class EndAtLimit(StoppingCriteria):  # type: ignore[misc]
    """Ends each response at a limit of its own."""

    def __init__(self, limits: Sequence[int], prompt_tokens: int) -> None:
        self._last = torch.tensor(limits) + prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor, **options: object) -> Tensor:
        return (self._last <= input_ids.shape[1]).to(input_ids.device)


class StopStrings(StoppingCriteria):  # type: ignore[misc]
    """Ends a response in which a stop string has appeared, as vLLM does; the prompt's text, with
    which transformers' own criterion would join it, does not count.
    """

    def __init__(self, decoder: Decoder, sampling: SamplingConfig, prompt_tokens: int) -> None:
        self._decoder = decoder
        self._sampling = sampling
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor, **options: object) -> Tensor:
        rows = input_ids[:, self._prompt_tokens :].cpu().numpy()
        stopped = [self._decoder.stops(row, self._sampling) for row in rows]
        return torch.tensor(stopped, device=input_ids.device)


class Recorder(LogitsProcessor):  # type: ignore[misc]
    """Makes the distribution that is sampled from, and notes the log-prob of each token that was
    then sampled.

    It sees a step's token only at the next call, so it keeps one step's log-probs at a time.
    """

    def __init__(self, sampling: SamplingConfig, prompt_tokens: int, ends: Tensor) -> None:
        self._processors = _processors(sampling, prompt_tokens, ends)
        self._temperature = sampling.temperature or 1.0
        self._last: Tensor | None = None
        self._found: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._note(input_ids)
        scores = scores / self._temperature
        for process in self._processors:
            scores = process(input_ids, scores)
        self._last = scores.float().log_softmax(-1)
        return scores

    def _note(self, input_ids: Tensor) -> None:
        if self._last is not None:
            self._found.append(self._last.gather(1, input_ids[:, -1:]))

    def finish(self, output: Tensor) -> Tensor:
        """The log-probs of all sampled tokens, shape [sequences, steps]."""
        self._note(output)
        return torch.cat(self._found, dim=1)


def _processors(
    sampling: SamplingConfig, prompt_tokens: int, ends: Tensor
) -> list[LogitsProcessor]:
    """In vLLM's order (v1/sample/sampler.py): they do not give the same in any other."""
    found: list[LogitsProcessor] = []
    if sampling.min_new_tokens and len(ends):
        least = sampling.min_new_tokens
        found.append(MinNewTokensLengthLogitsProcessor(prompt_tokens, least, ends))
    if sampling.min_p > 0:
        found.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    return found
