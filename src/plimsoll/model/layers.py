"""How the layers of a model compute, whether it was loaded or is traced without weights."""

from __future__ import annotations

from transformers import PreTrainedModel

from plimsoll.config.model import ModelConfig
from plimsoll.model.checkpointing import checkpoint_layers
from plimsoll.model.cpu.gated import fuse_gates
from plimsoll.model.cpu.norms import fuse_norms


def prepare_layers(lm: PreTrainedModel, config: ModelConfig) -> None:
    """Fuse norms and gated MLPs that are written as Llama's, and checkpoint what the config says;
    in place. Raises ConfigError as `checkpoint_layers`."""
    fuse_norms(lm)
    fuse_gates(lm)
    checkpoint_layers(lm, config)
