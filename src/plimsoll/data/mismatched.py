"""Prompts with responses to other prompts: what KTO measures its KL on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plimsoll.errors import DataError
from plimsoll.records import Sample


def mismatched(samples: Sequence[Sample], longest: int) -> list[Sample]:
    """Each sample's prompt with the response of the next sample of the batch that answers another
    prompt; the batch is a ring. Where all answer the same prompt, with the next one's.

    The response is everything from the first learned token on. What is over `longest` tokens is cut
    at the end; a prompt must be shorter than that. Source: Ethayarajh et al. 2024,
    https://arxiv.org/abs/2402.01306, section 4.2, which takes the next sample whatever it answers.
    Raises DataError for a batch of one, which has no other response.
    """
    if len(samples) < 2:
        raise DataError(
            "KTO measures its KL on prompts with other responses, and there is only one row: give "
            "data.eval at least two."
        )
    starts = [int(np.argmax(sample.loss_mask)) for sample in samples]
    prompts = [s.tokens[:start].tobytes() for s, start in zip(samples, starts, strict=True)]
    return [
        _joined(samples[i], starts[i], samples[j], starts[j], longest)
        for i, j in enumerate(_partners(prompts))
    ]


def _partners(prompts: Sequence[bytes]) -> list[int]:
    """Of each place the next one in the ring with another prompt. Found from the end, as equal
    neighbours share theirs."""
    count = len(prompts)
    other = [i for i in range(count) if prompts[i] != prompts[(i + 1) % count]]
    if not other:
        return [(i + 1) % count for i in range(count)]
    partners = [0] * count
    following = (other[0] + 1) % count
    for i in reversed(range(count)):
        if prompts[i] != prompts[(i + 1) % count]:
            following = (i + 1) % count
        partners[i] = following
    return partners


def _joined(asked: Sample, start: int, answered: Sample, first: int, longest: int) -> Sample:
    tokens = np.concatenate([asked.tokens[:start], answered.tokens[first:]])[:longest]
    loss_mask = np.concatenate([asked.loss_mask[:start], answered.loss_mask[first:]])[:longest]
    return Sample(tokens, loss_mask)
