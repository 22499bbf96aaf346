"""Figures of several responses to one prompt: pass@k, and the most frequent answer (maj@k)."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from math import comb


def pass_at_k(responses: int, passed: int, k: int) -> float:
    """Return the probability that at least one of k responses passes: 1 - C(n - c, k) / C(n, k).

    n responses were measured, and c passed. Unlike 1 - (1 - c/n)^k it has no bias. Source: Chen et
    al. 2021, https://arxiv.org/abs/2107.03374, section 2.1.
    """
    assert 0 <= passed <= responses and 1 <= k <= responses
    return 1 - comb(responses - passed, k) / comb(responses, k)


def majority(
    answers: Sequence[str | None], same: Callable[[str, str], bool] = operator.eq
) -> int | None:
    """Return the index of the first response with the most frequent answer (self-consistency).

    If answers are equally frequent, the first one wins. None is no answer, and no vote; without any
    answer the result is None. `same` says whether two answers that are written differently count as
    one: an answer joins the first earlier answer that is the same. Source: Wang et al. 2023,
    https://arxiv.org/abs/2203.11171.
    """
    votes: dict[str, int] = {}
    for answer, count in Counter(text for text in answers if text is not None).items():
        joined = next((earlier for earlier in votes if same(earlier, answer)), answer)
        votes[joined] = votes.get(joined, 0) + count
    return answers.index(max(votes, key=votes.__getitem__)) if votes else None
