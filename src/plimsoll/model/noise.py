"""NEFTune: noise on the input embeddings while training.

Jain et al. 2023, algorithm 1, https://arxiv.org/abs/2310.05914. Unlike in the paper, the noise of a
sequence is scaled by the sequence's length, not by that of a padded batch, and each sequence has a
seed. So the gradient does not depend on the sequence's neighbours in a pack, on the rank that
computes it, or on whether the run was interrupted.
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
    """The noise of a pack.

    Attributes:
        alpha: the strength.
        lengths_S: the length of each sequence.
        seeds_S: the seed of each sequence.
    """

    alpha: float
    lengths_S: tuple[int, ...]
    seeds_S: tuple[int, ...]

    def draw(self, width: int, device: torch.device) -> Tensor:
        """Return fp32 noise, [T, H], uniform within alpha / sqrt(length * width) for each token."""

        def noise(length: int, seed: int) -> Tensor:
            drawn = torch.Generator(device).manual_seed(seed)
            bound = self.alpha / (length * width) ** 0.5
            return torch.empty(length, width, device=device).uniform_(
                -bound, bound, generator=drawn
            )

        return torch.cat(list(map(noise, self.lengths_S, self.seeds_S)))


@contextmanager
def add_noise(embeddings: nn.Module, noise: EmbeddingNoise | None) -> Iterator[None]:
    """During the block, add noise to the embeddings that a pack gets, [1, T, H]; None: add none.

    The noise is added by a hook on the module's output. So it does not matter whether weights are
    divided, have an adapter, or layers are recomputed: the embeddings are computed once.
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
