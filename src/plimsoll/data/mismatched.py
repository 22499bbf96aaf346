"""Prompts with responses to other prompts, on which KTO measures its KL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plimsoll.errors import DataError
from plimsoll.records import Sample


def mismatch_responses(samples: Sequence[Sample], longest: int) -> list[Sample]:
    """Join each sample's prompt with the response to another prompt.

    The response comes from the next sample of the batch that has another prompt; after the last
    sample comes the first. If all prompts are equal, it comes from the next sample.

    The response is everything from the first learned token on. Source: Ethayarajh et al. 2024,
    https://arxiv.org/abs/2402.01306, section 4.2, which takes the next sample whatever its prompt.

    Args:
        samples: the batch.
        longest: tokens after which a joined sample is cut. Every prompt must be shorter.

    Raises:
        DataError: the batch has a single sample, so there is no other response.
    """
    if len(samples) < 2:
        raise DataError(
            "KTO measures its KL on prompts with other responses, and there is only one row: give "
            "data.eval at least two."
        )
    starts = [int(np.argmax(sample.loss_mask)) for sample in samples]
    prompts = [s.tokens[:start].tobytes() for s, start in zip(samples, starts, strict=True)]
    return [
        _join(samples[i], starts[i], samples[j], starts[j], longest)
        for i, j in enumerate(_partners(prompts))
    ]


def _partners(prompts: Sequence[bytes]) -> list[int]:
    """Return for each sample the position of the next sample with another prompt.

    The search goes backwards, as equal neighbours share their partner.
    """
    count = len(prompts)
    changes = [i for i in range(count) if prompts[i] != prompts[(i + 1) % count]]
    if not changes:
        return [(i + 1) % count for i in range(count)]
    partners = [0] * count
    following = (changes[0] + 1) % count
    for i in reversed(range(count)):
        if prompts[i] != prompts[(i + 1) % count]:
            following = (i + 1) % count
        partners[i] = following
    return partners


def _join(prompted: Sample, start: int, answered: Sample, first: int, longest: int) -> Sample:
    tokens = np.concatenate([prompted.tokens[:start], answered.tokens[first:]])[:longest]
    loss_mask = np.concatenate([prompted.loss_mask[:start], answered.loss_mask[first:]])[:longest]
    return Sample(tokens, loss_mask)
