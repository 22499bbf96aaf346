"""What several responses to a prompt tell: pass@k, and what most of them answer (maj@k)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb


def pass_at_k(responses: int, passed: int, k: int) -> float:
    """How likely at least one of k responses passes: 1 - C(n - c, k) / C(n, k) of n responses of
    which c passed. It has no bias, which 1 - (1 - c/n)^k has.

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, section 2.1.
    """
    assert 0 <= passed <= responses and 1 <= k <= responses
    return 1 - comb(responses - passed, k) / comb(responses, k)


def majority(answers: Sequence[str | None]) -> int | None:
    """Which response is the first to give the most frequent answer (self-consistency); of equally
    frequent answers the one that comes first. None is no answer and has no vote; where no one
    votes, None comes back.

    Source: Wang et al. 2023, https://arxiv.org/abs/2203.11171.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    return answers.index(votes.most_common(1)[0][0]) if votes else None
