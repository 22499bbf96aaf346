"""What several responses to a prompt tell: pass@k, and what most of them answer (maj@k)."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from math import comb


def pass_at_k(responses: int, passed: int, k: int) -> float:
    """How likely at least one of k responses passes: 1 - C(n - c, k) / C(n, k) of n responses of
    which c passed. It has no bias, which 1 - (1 - c/n)^k has.

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, section 2.1.
    """
    assert 0 <= passed <= responses and 1 <= k <= responses
    return 1 - comb(responses - passed, k) / comb(responses, k)


def majority(
    answers: Sequence[str | None], same: Callable[[str, str], bool] = operator.eq
) -> int | None:
    """Return which response is the first to give the most frequent answer (self-consistency); of
    equally frequent answers the one that comes first. None is no answer and has no vote; without
    any vote the result is None.

    Args:
        answers: The answer of each response.
        same: Whether two answers that are written differently count as one. An answer joins the
            first one before it that is the same.

    Source: Wang et al. 2023, https://arxiv.org/abs/2203.11171.
    """
    votes: dict[str, int] = {}
    for answer, count in Counter(one for one in answers if one is not None).items():
        joined = next((earlier for earlier in votes if same(earlier, answer)), answer)
        votes[joined] = votes.get(joined, 0) + count
    return answers.index(max(votes, key=votes.__getitem__)) if votes else None
