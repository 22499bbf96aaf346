"""The output head, forward and backward: chunked (for any loss, and for means) beside whole logits.

    python benchmarks/head.py [--tokens 2048] [--threads 1]

Prints median times, and the bytes of logits that exist at once, by count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from plimsoll.model.logit_chunks import LogitForm
from plimsoll.model.token_logprobs import token_logprobs, token_nll

HIDDEN, VOCABULARY, CHUNK, ROUNDS = 512, 8192, 1024, 5


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The head of the project, for any loss."""
    form = LogitForm()
    found = token_logprobs(hidden, weight, targets, chunk=CHUNK, form=form)
    return found.logprobs_L.sum()


def mean(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The head of the project, for means."""
    return token_nll(hidden, weight, targets, len(targets), chunk=CHUNK, form=LogitForm())


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The plain computation: all logits, an fp32 copy, log-softmax, gather."""
    logits = (hidden @ weight.T).float()
    return logits.log_softmax(-1).gather(1, targets[:, None]).sum()


def seconds(head: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: tuple[Tensor, ...]) -> float:
    """Forward and backward, once."""
    hidden, weight, targets = inputs
    start = time.perf_counter()
    head(hidden, weight, targets).backward()
    hidden.grad = weight.grad = None
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    # logits of about 1, as models begin with: exponentials of numbers below -87 are slow on CPUs
    weight = (torch.randn(VOCABULARY, HIDDEN) / HIDDEN**0.5).bfloat16().requires_grad_()
    targets = torch.randint(VOCABULARY, (options.tokens,))
    heads = {"chunked": chunked, "mean": mean, "whole logits": whole}
    times: dict[str, list[float]] = {name: [] for name in heads}
    for _ in range(ROUNDS + 1):  # in turn, so that a drift of the machine meets both
        for name, head in heads.items():
            times[name].append(seconds(head, (hidden, weight, targets)))
    chunk = 2 * min(CHUNK, options.tokens) * VOCABULARY
    held = {
        "chunked": chunk,
        "mean": chunk,
        "whole logits": (2 + 4 + 4 + 2) * options.tokens * VOCABULARY,
    }
    print(
        f"{options.tokens} tokens, vocabulary {VOCABULARY}, bfloat16, {options.threads} thread(s)"
    )
    for name, found in times.items():
        median = statistics.median(found[1:])
        print(f"{name:>12}: {median * 1e3:7.1f} ms, logits by count {held[name] / 2**20:6.0f} MiB")


if __name__ == "__main__":
    main()
