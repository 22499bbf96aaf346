"""NEFTune: noise on the input embeddings while training; Jain et al. 2023, algorithm 1,
https://arxiv.org/abs/2310.05914.

Departure from the paper: a sequence's noise is scaled by its own length, not by that of a padded
batch, and is drawn from a seed of its own: so the gradient depends neither on what a sequence is
packed with, nor on the rank that computes it, nor on whether the run was interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


@dataclass(frozen=True)
class EmbeddingNoise:
    """The noise of a pack. lengths_S, seeds_S: of each of its sequences."""

    alpha: float
    lengths_S: tuple[int, ...]
    seeds_S: tuple[int, ...]

    def draw(self, width: int, device: torch.device) -> Tensor:
        """Of every token, [T, H] in fp32: uniform within alpha / sqrt(length * width)."""

        def noise(length: int, seed: int) -> Tensor:
            drawn = torch.Generator(device).manual_seed(seed)
            bound = self.alpha / (length * width) ** 0.5
            return torch.empty(length, width, device=device).uniform_(
                -bound, bound, generator=drawn
            )

        return torch.cat(list(map(noise, self.lengths_S, self.seeds_S)))


@contextmanager
def noisy(embeddings: nn.Module, noise: EmbeddingNoise | None) -> Iterator[None]:
    """Within: the embeddings of a pack, [1, T, H], come with its noise; None: as they are.

    A hook on the module's output, so that it works whoever divides the module's weights, adds an
    adapter to them or computes layers again: the embeddings are computed once.
    """
    if noise is None:
        yield
        return

    def add(module: nn.Module, inputs: object, embedded_1TH: Tensor) -> Tensor:
        drawn_TH = noise.draw(embedded_1TH.shape[-1], embedded_1TH.device)
        fills = embedded_1TH.shape[1] - len(drawn_TH)
        return embedded_1TH + pad(drawn_TH, (0, 0, 0, fills)).to(embedded_1TH.dtype)

    hook = embeddings.register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()
