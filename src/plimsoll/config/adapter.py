"""Low-rank adapters: LoRA and its kin."""

from __future__ import annotations

from plimsoll.config.base import PositiveFloat, PositiveInt, Probability, Settings

ADAPTER_FILE = "adapter_config.json"
"""PEFT's config in an adapter's directory."""


class AdapterConfig(Settings):
    """LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685; trained and saved with PEFT."""

    rank: PositiveInt = 16
    """The inner dimension of each pair of matrices."""
    alpha: PositiveFloat = 32.0
    """The adapter's output is scaled by alpha / rank (with rslora, by alpha / sqrt(rank))."""
    dropout: Probability = 0.0
    """Dropout on the adapter's input."""
    targets: tuple[str, ...] = ("all-linear",)
    """The modules that get adapters, by the last part of their names, such as q_proj;
    `all-linear` is every linear layer but the output head."""
    rslora: bool = False
    """Scale by the root of the rank; Kalajdzievski 2023, https://arxiv.org/abs/2312.03732."""
    dora: bool = False
    """Learn magnitudes beside directions; Liu et al. 2024, https://arxiv.org/abs/2402.09353."""
