"""Files for other programs: the full trained model, or the adapter alone."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from plimsoll.model.adapters import adapter_bytes, save_adapter
from plimsoll.model.files import Companions, save_hf, saved_buffers, weights_for_files
from plimsoll.model.policy import PolicyModel, ValueModel
from plimsoll.trainer.price import SAVE_BUCKET
from plimsoll.trainer.protocol import Engine
from plimsoll.trainer.weights import plain_weights, plan_buckets


def write_model(engine: Engine, companion_files: Companions, directory: Path, rank: int) -> None:
    """Write the model as a Hugging Face directory; all ranks must call it.

    Weights are gathered bucket by bucket into rank 0's host memory.
    """
    state: dict[str, Tensor] = {}
    for names in plan_buckets(engine, SAVE_BUCKET):
        with plain_weights(engine, names) as weights:
            if rank == 0:
                state |= {name: t.to("cpu", copy=True) for name, t in weights().items()}
    if rank == 0:
        model = _model(engine)
        state |= {name: buffer.cpu() for name, buffer in saved_buffers(model).items()}
        tensors = weights_for_files(model.lm, state)
        save_hf(
            model.lm.config,
            tensors,
            companion_files.tokenizer,
            directory,
            companion_files.generation,
        )


@dataclass(frozen=True)
class AdapterFiles:
    """A trained adapter as PEFT's two files, and the version of its weights."""

    config: bytes
    weights: bytes
    version: int


def write_adapter(engine: Engine, companion_files: Companions, directory: Path, rank: int) -> None:
    """Write the trained parameters, without the base, as a PEFT directory.

    All ranks must call it.
    """
    with _gather_trained(engine) as tensors:
        if rank == 0:
            save_adapter(_model(engine), tensors, companion_files, directory)


def adapter_files(engine: Engine, version: int, rank: int) -> AdapterFiles | None:
    """Return the adapter's PEFT files on rank 0, None on other ranks; all ranks must call it."""
    with _gather_trained(engine) as tensors:
        if rank > 0:
            return None
        return AdapterFiles(*adapter_bytes(_model(engine), tensors), version)


def _gather_trained(engine: Engine) -> AbstractContextManager[dict[str, Tensor]]:
    return engine.gather([n for n, p in engine.module.named_parameters() if p.requires_grad])


def _model(engine: Engine) -> PolicyModel | ValueModel:
    assert isinstance(engine.module, PolicyModel | ValueModel)
    return engine.module
