"""A training forward and backward of a 27M-parameter model: packed beside padded, in one run.

    python benchmarks/packing.py [--threads 2]

Both see the same sequences, 40 to 360 tokens long, and compute the same loss in bfloat16; padded is
transformers' own model with whole logits. Prints useful tokens per second.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from decided import decided_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from plimsoll.commands.demo import make_tokenizer
from plimsoll.data.packing import pack
from plimsoll.model.load import load_policy
from plimsoll.model.policy import PackTensors, PolicyModel
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.records import Sample

VOCABULARY, SEQUENCES, BUDGET, ROUNDS = 8192, 20, 4096, 3


def samples() -> list[Sample]:
    """Random sequences; everything but the first token is learned."""
    rng = np.random.default_rng(0)
    found = []
    for length in rng.integers(40, 360, size=SEQUENCES):
        loss_tokens = np.ones(length, dtype=np.bool_)
        loss_tokens[0] = False
        found.append(Sample(rng.integers(VOCABULARY, size=length), loss_tokens))
    return found


def packed_seconds(model: PolicyModel, batch: list[Sample]) -> float:
    """One pass over the batch in packs."""
    start = time.perf_counter()
    for one in pack(batch, 1, BUDGET)[0]:
        tensors = PackTensors.from_pack(one, torch.device("cpu"))
        (-model(tensors, False).logprobs_L.mean()).backward()
    model.zero_grad()
    return time.perf_counter() - start


def padded_seconds(model: PreTrainedModel, batch: list[Sample]) -> float:
    """One pass over the batch, padded to its longest sequence."""
    start = time.perf_counter()
    longest = max(len(s.tokens) for s in batch)
    tokens = torch.zeros(len(batch), longest, dtype=torch.long)
    labels = torch.full((len(batch), longest), -100)
    mask = torch.zeros(len(batch), longest, dtype=torch.long)
    for i, sample in enumerate(batch):
        length = len(sample.tokens)
        tokens[i, :length] = torch.from_numpy(sample.tokens)
        labels[i, :length] = tokens[i, :length]
        mask[i, :length] = 1
    model(input_ids=tokens, attention_mask=mask, labels=labels).loss.backward()
    model.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    batch = samples()
    useful = sum(len(s.tokens) for s in batch)
    shape = {"vocab": VOCABULARY, "hidden": 512, "layers": 8, "heads": 8, "feed_forward": 1408}
    config = tiny_config("qwen2", True, kv_heads=4, **shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        write_tiny_model(path, config, 0, make_tokenizer())
        ours = load_policy(decided_model(path=str(path), dtype="bfloat16"), torch.device("cpu"))
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    times: dict[str, list[float]] = {"packed": [], "padded": []}
    for _ in range(ROUNDS + 1):
        times["packed"].append(packed_seconds(ours, batch))
        times["padded"].append(padded_seconds(plain, batch))
    print(f"{useful} tokens in {len(batch)} sequences, bfloat16, {options.threads} thread(s)")
    for name, found in times.items():
        print(f"{name:>7}: {useful / statistics.median(found[1:]):7.0f} tokens/s")


if __name__ == "__main__":
    main()
