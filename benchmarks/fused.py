"""Norms, gated MLPs and rotary embeddings, forward and backward: Plimsoll's own functions, Liger's
kernels (on a card, with liger-kernel) and transformers', side by side in one run.

    python benchmarks/fused.py [--tokens 8192] [--rounds 20]

Of the shapes of Llama 3 8B, in bfloat16, on the first card or, without one, on the CPU with one
thread. Prints median times and, on a card, the most memory that a round took.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from plimsoll.model import fused

HIDDEN, INNER, HEADS, KV_HEADS, WIDTH = 4096, 14336, 32, 8, 128
EPSILON = 1e-5

Function = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Part:
    """What is compared. functions: by whose they are. shapes: of the inputs that get a gradient;
    given: other inputs, which come after them."""

    functions: Mapping[str, Function]
    shapes: Sequence[tuple[int, ...]]
    given: Sequence[Tensor] = ()


@dataclass
class Taken:
    """Of each round: seconds, and bytes on a card beyond its inputs."""

    seconds: list[float] = field(default_factory=list)
    bytes: int = 0


def parts(tokens: int, device: torch.device) -> dict[str, Part]:
    """All that are compared, by name."""
    norm = LlamaRMSNorm(HIDDEN, EPSILON).to(device, torch.bfloat16)
    norms: dict[str, Function] = {
        "own": lambda x, weight: fused.rms_norm(x, weight, EPSILON),
        "transformers": lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, x),
        "torch.rms_norm": lambda x, weight: torch.rms_norm(x, (HIDDEN,), weight, EPSILON),
    }
    silus: dict[str, Function] = {"own": fused.silu_gate, "transformers": lambda a, b: silu(a) * b}
    gelus: dict[str, Function] = {"transformers": lambda a, b: gelu(a, approximate="tanh") * b}
    rotations: dict[str, Function] = {"transformers": apply_rotary_pos_emb}
    if device.type == "cuda" and importlib.util.find_spec("liger_kernel"):
        from plimsoll.model import liger

        norms["liger"] = lambda x, weight: liger.rms_norm(x, weight, EPSILON)
        silus["liger"], gelus["liger"] = liger.silu_gate, liger.gelu_gate
        rotations["liger"] = liger.rotate
    angles = torch.rand(1, tokens, WIDTH // 2, device=device).repeat(1, 1, 2)
    tables = [angles.cos().bfloat16(), angles.sin().bfloat16()]
    gates = [(1, tokens, INNER)] * 2
    heads = [(1, tokens, heads, WIDTH) for heads in (HEADS, KV_HEADS)]
    return {
        "norm": Part(norms, [(1, tokens, HIDDEN), (HIDDEN,)]),
        "silu(gate) * up": Part(silus, gates),
        "gelu(gate) * up": Part(gelus, gates),
        "rotary embedding": Part({n: _by_token(f) for n, f in rotations.items()}, heads, tables),
    }


def _by_token(rotate: Function) -> Function:
    """Of heads that lie token after token, as projections make them."""

    def rotated(queries: Tensor, keys: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
        return tuple(rotate(queries.transpose(1, 2), keys.transpose(1, 2), *tables))

    return rotated


def run(function: Function, part: Part, device: torch.device, taken: Taken) -> None:
    """One round, with new inputs, as a backward pass may write over them."""
    inputs = [
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for shape in part.shapes
    ]
    with torch.no_grad():
        made = function(*inputs, *part.given)
    outputs = made if isinstance(made, tuple) else (made,)
    slopes = [torch.randn_like(output) for output in outputs]
    del made, outputs
    before = _settle(device)
    start = time.perf_counter()
    made = function(*inputs, *part.given)
    torch.autograd.backward(made, slopes)
    if device.type == "cuda":
        torch.cuda.synchronize()
        taken.bytes = torch.cuda.max_memory_allocated() - before
    taken.seconds.append(time.perf_counter() - start)


def _settle(device: torch.device) -> int:
    """Bytes on the card, with nothing under way."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=8192 if device.type == "cuda" else 512)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, 1 thread"
    print(f"{name}, {options.tokens} tokens, bfloat16, median of {options.rounds}")
    for title, part in parts(options.tokens, device).items():
        taken = {whose: Taken() for whose in part.functions}
        for _ in range(options.rounds + 1):  # in turn, so that a drift meets all; the first warms
            for whose, function in part.functions.items():
                run(function, part, device, taken[whose])
        print(title)
        for whose, found in taken.items():
            line = f"{whose:>16}: {statistics.median(found.seconds[1:]) * 1e3:8.3f} ms"
            room = f", {found.bytes / 2**20:6.0f} MiB" if device.type == "cuda" else ""
            print(line + room)


if __name__ == "__main__":
    main()
