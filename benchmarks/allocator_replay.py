"""What a card's allocator reserves for a run, replayed without a card.

    python benchmarks/allocator_replay.py [CASE ...]

Takes some minutes a case. A run's micro-batches, of sequences as long as GSM8K's, are run on fake
tensors, and what they allocate and release is served by the model in caching_allocator.py: with
fixed segments and with growing ones, with packs as they come and with packs whose rows are filled
up to few sizes. The cases are those that one H200 ran, with fixed segments; what it showed is
printed beside them.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from decided import decided_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen2Config

from caching_allocator import Block, CachingAllocator, up
from plimsoll.config.engine import AdapterConfig
from plimsoll.data.packing import pack
from plimsoll.model import logit_chunks
from plimsoll.model.adapters import add_adapter
from plimsoll.model.attention import Attended, PackLayout, dot_product, register_kernel
from plimsoll.model.checkpointing import checkpoint_layers
from plimsoll.model.fused import GATE, NORM, fuse
from plimsoll.model.logit_chunks import LogitForm
from plimsoll.model.policy import HeadForm, PackTensors, PolicyModel
from plimsoll.model.token_logprobs import Imitation
from plimsoll.records import Sample
from plimsoll.shapes.known_models import read_shape

GB = 1e9
KERNEL = "whole_pack"
LEARNED = 0.56
"""Of a sequence's tokens, about what GSM8K's answers are."""


@dataclass(frozen=True)
class Case:
    """A run of SFT or of GRPO on one card at stage 0, with gradient checkpointing.

    sequences: of a step. mean, deviation: of the logarithm of their lengths. rank: of an adapter of
    a model in 4 bits; 0 where all weights are trained. live, reserved: bytes that the H200 showed
    in training, in GB.
    """

    model: str
    sequences: int
    budget: int
    steps: int
    mean: float
    deviation: float
    rank: int
    live: float
    reserved: float


SHORT = (
    5.03,
    0.37,
)  # GSM8K's problems and answers, in a vocabulary of 8,192: 165 tokens on average
LONG = (5.79, 0.07)  # a problem and an answer of 256 tokens, where none ends by itself
CASES = {
    "SFT of 1.5B": Case("Qwen/Qwen2.5-1.5B", 256, 32_768, 6, *SHORT, 0, 30.9, 37.44),
    "QLoRA of 7B": Case("Qwen/Qwen2.5-7B", 128, 16_384, 6, *SHORT, 16, 10.9, 15.25),
    "GRPO of 0.5B": Case("Qwen/Qwen2.5-0.5B", 256, 16_384, 4, *LONG, 0, 9.9, 13.04),
}

Event = tuple[int, int]
"""The number of a storage, and its bytes; -1 when it is gone."""


class Recorder(TorchDispatchMode):
    """Writes down when operations make storages, and when these go."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._known: dict[int, int] = {}
        self._count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self.see(leaf)
        return result

    def see(self, tensor: Tensor) -> None:
        """Write down a tensor's storage, if it is new."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            number = self._known[storage._cdata] = self._count
            self._count += 1
            self.events.append((number, storage.nbytes()))
            weakref.finalize(storage, self._forget, storage._cdata, number)

    def _forget(self, key: int, number: int) -> None:
        del self._known[key]
        self.events.append((number, -1))


def attend(one: Attended) -> Tensor:
    """In one kernel for the pack, as a card's varlen_attn; what it computes does not matter."""
    output = dot_product(one.query, one.key, one.value, None, one.scaling)
    return output.transpose(1, 2).contiguous()


def build(case: Case) -> PolicyModel:
    """The model as a card has it, on the meta device."""
    shape = read_shape(case.model)
    config = Qwen2Config(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=KERNEL
        )
        fuse(lm, (NORM, GATE))
        checkpoint_layers(lm, decided_model(path=case.model, gradient_checkpointing=True))
        module = PolicyModel(lm, HeadForm(1024, LogitForm()))
        if case.rank:
            add_adapter(module, AdapterConfig(rank=case.rank), case.model, seed=0)
    return module.train()


def pack_tensors(tokens: int, loss_tokens: int) -> PackTensors:
    """A pack of one sequence: what a kernel for the whole pack holds depends on the sum alone."""
    borders = np.array([0, tokens], dtype=np.int32)
    return PackTensors(
        tokens_T=torch.zeros(tokens, dtype=torch.int64),
        positions_T=torch.zeros(tokens, dtype=torch.int64),
        layout=PackLayout.of(borders, np.zeros(1, dtype=np.int64), torch.device("cpu")),
        predictor_L=torch.zeros(loss_tokens, dtype=torch.int64),
        targets_L=torch.zeros(loss_tokens, dtype=torch.int64),
        cu_loss_tokens=torch.zeros(2, dtype=torch.int32),
        predictors=np.zeros(loss_tokens, dtype=np.int64),
    )


@cache
def micro_batch(case: Case, tokens: int, loss_tokens: int) -> tuple[Event, ...]:
    """What a forward and backward makes and releases, beside gradients that are there already."""
    module = build(case)
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder:
        module.to_empty(device="cpu")
        module.lm.tie_weights()
        for parameter in module.parameters():
            recorder.see(parameter)
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        before = recorder._count
        loss = module(pack_tensors(tokens, loss_tokens), lesson=Imitation(loss_tokens))
        loss.backward()
        del loss
        events = [event for event in recorder.events if event[0] >= before]
    gone = {number for number, size in events if size < 0}
    kept = {number for number, size in events if size >= 0} - gone
    return (*events, *((number, -1) for number in kept))


def steps_of(case: Case) -> Iterator[list[tuple[int, int]]]:
    """The tokens and learned tokens of each step's packs."""
    rng = np.random.default_rng(0)
    for _ in range(case.steps):
        drawn = np.exp(rng.normal(case.mean, case.deviation, case.sequences))
        lengths = np.clip(drawn.astype(int), 20, 512)
        samples = [
            Sample(np.zeros(n, dtype=np.int64), np.arange(n) >= (1 - LEARNED) * n) for n in lengths
        ]
        yield [(one.tokens, one.loss_tokens) for one in pack(samples, 1, case.budget)[0]]


def filled(rows: int, sizes: int) -> int:
    """Rows filled up to one of so many sizes from a power of two to the next; 0: as they are."""
    return up(rows, 2 ** (rows - 1).bit_length() // (2 * sizes)) if sizes else rows


def load(case: Case, allocator: CachingAllocator) -> list[int]:
    """Weights, masters and moments, as DeepSpeed makes them at stage 0: with the gradients of a
    step that it only tries. Gives the elements of each trained tensor."""
    parameters = [(p.numel(), p.requires_grad) for p in build(case).parameters()]
    trained = [elements for elements, learns in parameters if learns]
    vocabulary = read_shape(case.model).vocabulary
    for elements, learns in parameters:
        in_4_bits = case.rank and not learns and elements > 10**6 and elements % vocabulary
        allocator.allocate(int(elements * 0.516) if in_4_bits else 2 * elements)
    for elements in trained:
        allocator.allocate(4 * elements)
    tried = [allocator.allocate(each * n) for each in (2, 4) for n in trained]
    for elements in trained:
        allocator.allocate(4 * elements)
        allocator.allocate(4 * elements)
    for block in tried:
        allocator.release(block)
    return trained


def train(case: Case, allocator: CachingAllocator, sizes: int) -> None:
    """All steps: each pack's forward and backward, then the gradients in fp32."""
    trained = load(case, allocator)
    for packs in steps_of(case):
        gradients: list[Block] = []
        for tokens, loss_tokens in packs:
            blocks: dict[int, Block] = {}
            events = micro_batch(case, filled(tokens, sizes), filled(loss_tokens, sizes))
            for number, size in events:
                if size >= 0:
                    blocks[number] = allocator.allocate(size)
                else:
                    allocator.release(blocks.pop(number))
            gradients = gradients or [allocator.allocate(2 * n) for n in trained]
        gradients += [allocator.allocate(4 * n) for n in trained]
        for block in gradients:
            allocator.release(block)


def report(name: str, tell: Callable[[str], object]) -> None:
    """Replay a case in all ways."""
    case = CASES[name]
    tell(f"{name}: one H200 showed {case.live} GB live, {case.reserved} reserved")
    for sizes in (0, 16, 8):
        rows = [size for packs in steps_of(case) for size, _ in packs]
        more = sum(filled(size, sizes) for size in rows) / sum(rows) - 1
        packs = f"filled, {more:.1%} more tokens" if sizes else "as they come"
        for growing in (False, True):
            allocator = CachingAllocator(growing=growing)
            train(case, allocator, sizes)
            gap = allocator.most_reserved / allocator.most_live - 1
            tell(
                f"  packs {packs}, {'growing' if growing else 'fixed'} segments: "
                f"{allocator.most_live / GB:.2f} GB live, {allocator.most_reserved / GB:.2f} "
                f"reserved, {gap:.0%} more"
            )


def main(names: Sequence[str]) -> None:
    """Print all."""
    register_kernel(KERNEL, attend)
    # Fake tensors are on the CPU; blocks are to be as large as on a card.
    logit_chunks.BLOCK_ELEMENTS_CPU = logit_chunks.BLOCK_ELEMENTS_ACCELERATOR
    for name in names:
        report(name, lambda text: print(text, flush=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("cases", nargs="*", default=[*CASES], metavar="CASE", help=", ".join(CASES))
    main(parser.parse_args().cases)
