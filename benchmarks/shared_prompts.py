"""A DPO forward and backward of a 27M-parameter model: prompts computed once, and twice.

    python benchmarks/shared_prompts.py [--threads 1] [--device cpu] [--rounds 3]

Both see the same pairs in one micro-batch, in turn. Prints tokens per second, every prompt counted
twice for both, and the highest sum of live tensors beyond weights and gradients.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from decided import decided_model
from torch import Tensor
from torch.nn.functional import logsigmoid

from plimsoll.algorithm.preference import in_pairs
from plimsoll.algorithm.sequences import sums
from plimsoll.commands.demo import make_tokenizer
from plimsoll.data.packing import pack_pairs
from plimsoll.model.load import load_policy
from plimsoll.model.policy import PackTensors, PolicyModel
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.records import Pair, Sample, samples_of
from traced_bytes import measure

VOCABULARY = 8192
CASES = {
    "like HH-RLHF": (8, 150, 60),
    "long prompts": (2, 1000, 100),
    "long responses": (2, 100, 600),
}
"""Pairs, and about how many tokens a prompt and a response have."""


@dataclass(frozen=True)
class Side:
    """A model and the one micro-batch of it."""

    module: PolicyModel
    pack: PackTensors

    def run(self, enter: Callable[[str], None]) -> None:
        """The loss of pairs against a reference that finds both responses equal, and back."""
        enter("all")
        loss: Tensor = -logsigmoid(0.1 * in_pairs(self._logprobs()).margin_P).mean()
        loss.backward()

    def _logprobs(self) -> Tensor:
        return sums(self.module(self.pack, False).logprobs_L, self.pack.cu_loss_tokens)

    def seconds(self) -> float:
        """Of one forward and backward."""
        self.module.zero_grad()
        self.finish()
        start = time.perf_counter()
        self.run(lambda stretch: None)
        self.finish()
        return time.perf_counter() - start

    def finish(self) -> None:
        """Wait for the device."""
        if self.pack.tokens_T.is_cuda:
            torch.cuda.synchronize()


def pairs_of(count: int, prompt: int, response: int) -> list[Pair]:
    """Random pairs, their lengths spread by a half to both sides."""
    rng = np.random.default_rng(0)

    def drawn(around: int) -> int:
        return int(rng.integers(around // 2, around + around // 2))

    found = []
    for _ in range(count):
        begin = rng.integers(VOCABULARY, size=drawn(prompt))
        ends = (rng.integers(VOCABULARY, size=drawn(response)) for _ in range(2))
        both = (np.concatenate([begin, end]) for end in ends)
        found.append(Pair(*(Sample(one, np.arange(len(one)) >= len(begin)) for one in both)))
    return found


def side(model: PolicyModel, pairs: list[Pair], share: bool, device: torch.device) -> Side:
    """All pairs in one micro-batch."""
    budget = sum(len(sample.tokens) for sample in samples_of(pairs))
    [[pack]] = pack_pairs(pairs, 1, budget, share_prompts=share)
    return Side(model, PackTensors.from_pack(pack, device))


def load(device: torch.device) -> PolicyModel:
    """A random model in bfloat16."""
    shape = {"vocab": VOCABULARY, "hidden": 512, "layers": 8, "heads": 8, "feed_forward": 1408}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        config = tiny_config("qwen2", True, kv_heads=4, **shape)
        write_tiny_model(path, config, 0, make_tokenizer())
        return load_policy(decided_model(path=str(path), dtype="bfloat16"), device).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    model = load(device)
    print(f"bfloat16, {options.threads} thread(s), {device}")
    for name, case in CASES.items():
        pairs = pairs_of(*case)
        sides = {share: side(model, pairs, share, device) for share in (False, True)}
        times: dict[bool, list[float]] = {share: [] for share in sides}
        for _ in range(options.rounds + 1):
            for share, each in sides.items():
                times[share].append(each.seconds())
        print(f"{name}: {case[0]} pairs, prompts of about {case[1]} and responses of {case[2]}")
        for share, found in times.items():
            tokens = sum(len(sample.tokens) for sample in samples_of(pairs))
            rate = tokens / statistics.median(found[1:])
            peak = measure(sides[share]).activations / 2**20
            print(f"{'shared' if share else 'twice':>8}: {rate:7.0f} tokens/s, {peak:6.0f} MiB")


if __name__ == "__main__":
    main()
