"""The optimizer of a trained role, its parameter groups, and its moments as flat tensors.

DeepSpeed's Adam on the CPU is in C++, and a machine compiles it at its first use.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.config.engine import OptimizerConfig, TrainedRole
from plimsoll.errors import PlimsollError
from plimsoll.machine.versions import own_scripts
from plimsoll.trainer.zero.config import ZeroConfig

_MOST_IN_8_BITS = 2**30
"""The most elements of a group of parameters: a rank's share of it has under 2^31. DeepSpeed lays
the share out as one row, and bitsandbytes 0.50 counts a row on CUDA in 32 bits (backends/cuda/
ops.py, `c_int32(g.numel())`): it would update a part of a longer row, or nothing."""


# On a machine with nvcc and no GPU, torch.utils.cpp_extension logs a warning at import.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

MOST_SECONDS = 600.0
"""The time that compiling may take; it takes about one minute."""

_SHOWN_LINES = 3


def parameter_groups(module: nn.Module, settings: OptimizerConfig) -> list[dict[str, object]]:
    """Return AdamW's groups: matrices decay, vectors (norms, biases) never do.

    The biases of a layer's experts are one tensor, but no matrix. Embeddings (and a head tied to
    one) decay if the settings say so. A group that would be too long for 8 bits is split.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    tables = [part.weight for part in module.modules() if isinstance(part, nn.Embedding)]
    undecayed = set() if settings.decay_embeddings else set(map(id, tables))
    undecayed |= {id(p) for name, p in trained.items() if p.ndim < 2 or name.endswith("_bias")}
    decaying = [p for p in trained.values() if id(p) not in undecayed]
    never_decaying = [p for p in trained.values() if id(p) in undecayed]
    most = _MOST_IN_8_BITS if settings.kind == "adamw_8bit" else inf
    return [
        {"params": part, "weight_decay": decay}
        for parameters, decay in ((decaying, settings.weight_decay), (never_decaying, 0.0))
        for part in _parts(parameters, most)
    ]


def _parts(parameters: Sequence[nn.Parameter], most: float) -> list[list[nn.Parameter]]:
    """Split parameters into parts of at most `most` elements; a larger parameter is alone."""
    parts: list[list[nn.Parameter]] = []
    room = 0.0
    for parameter in parameters:
        if parameter.numel() > room or not parts:
            parts.append([])
            room = most
        parts[-1].append(parameter)
        room -= parameter.numel()
    return parts


MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(module: nn.Module, role: TrainedRole) -> torch.optim.Optimizer:
    """Return the AdamW of the role's settings for the module's trained parameters.

    The learning rate is set at every step. It starts at 0 because DeepSpeed may take a dry step to
    allocate the states, which must not decay the weights.
    """
    settings = role.optimizer
    groups, betas = parameter_groups(module, settings), (settings.beta1, settings.beta2)
    arguments: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": settings.eps}
    zero = role.settings_of(ZeroConfig)
    if zero.optimizer_offload == "cpu":
        wide = zero.state_dtype == "float32"
        return _cpu_adam(groups, arguments | {"fp32_optimizer_states": wide, "adamw_mode": True})
    if settings.kind == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        optimizer: torch.optim.Optimizer = AdamW8bit(groups, **arguments)
        return optimizer
    return torch.optim.AdamW(groups, **arguments, fused=True)


def _cpu_adam(
    groups: Sequence[Mapping[str, object]], arguments: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Return DeepSpeed's Adam on the CPU.

    Raises:
        PlimsollError: It cannot be compiled or loaded.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    offer_ninja()
    try:
        with building("cpu_adam"):
            optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, **arguments)
    except (RuntimeError, OSError, ImportError) as error:
        raise PlimsollError(
            "DeepSpeed's Adam for the CPU (optimizer_offload: cpu) cannot be compiled or loaded: "
            f"{compiler_errors(str(error.__cause__ or error))}\n`plimsoll doctor` says whether a "
            "compiler, ninja or Python's headers are missing. It is compiled into "
            "TORCH_EXTENSIONS_DIR, ~/.cache/torch_extensions by default, which must be writable."
        ) from error
    return optimizer


def forget_dry_step(optimizer: Any) -> None:
    """Set Adam's step count back to 0.

    At stage 0 in bf16 DeepSpeed allocates the moments by a step on zero gradients. If Adam counted
    that step, its bias correction would make the first real step too short.
    """
    for state in optimizer.optimizer.state.values() if hasattr(optimizer, "optimizer") else ():
        if "step" in state:
            step = state["step"]
            state["step"] = torch.zeros_like(step) if isinstance(step, Tensor) else 0


def forget_gradients(optimizer: Any) -> None:
    """Drop the gradients of an optimizer step that was skipped.

    With its optimizer on the host, DeepSpeed 0.19.8 would otherwise add the next step's gradients
    to them (zero/stage_1_and_2.py, `step`).
    """
    if getattr(optimizer, "cpu_offload", False):
        optimizer.averaged_gradients = dict.fromkeys(optimizer.averaged_gradients)


def moment_rows(
    optimizer: torch.optim.Optimizer, masters: Sequence[Tensor]
) -> dict[str, list[Tensor]]:
    """Return both moments of every master by name, flat; zeros for a master without gradients.

    Return an empty dict before the first update, which makes the moments.
    """
    states = [optimizer.state.get(master, {}) for master in masters]
    if not any(MOMENTS[0] in state for state in states):
        return {}
    pairs = list(zip(states, masters, strict=True))
    return {name: [_row(state.get(name), master) for state, master in pairs] for name in MOMENTS}


def _row(moment: Tensor | None, master: Tensor) -> Tensor:
    return (torch.zeros_like(master.data) if moment is None else moment).view(-1)


def begin_moments(
    optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], updates: int
) -> dict[str, list[Tensor]]:
    """Make missing moments as AdamW does, and return all by name, flat, to be written into.

    `updates`: the updates to count as done; after 0 there are no moments.
    """
    wide = getattr(optimizer, "fp32_optimizer_states", False)  # an attribute of DeepSpeedCPUAdam
    for master in masters:
        state, dtype = optimizer.state[master], torch.float32 if wide else master.dtype
        if updates == 0:
            state.clear()
        elif not state:
            state |= {name: torch.zeros_like(master.data, dtype=dtype) for name in MOMENTS}
        if state:  # the number of updates, for the bias correction, is a tensor in torch's AdamW
            is_torch = isinstance(optimizer, torch.optim.AdamW)
            step = torch.tensor(float(updates), device=master.device) if is_torch else updates
            state["step"] = step
    return moment_rows(optimizer, masters)


def offer_ninja() -> None:
    """Add this Python's script folder to PATH if PATH has no ninja, which torch looks for there.

    If a command is called by its path (.venv/bin/plimsoll), PATH may lack that folder.
    """
    if shutil.which("ninja") is None:
        os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:{own_scripts()}"


@contextmanager
def building(name: str) -> Iterator[None]:
    """Keep other runs from compiling the extension in the block, and remove a killed run's lock.

    Torch makes a lock file while it compiles, and waits for ever for a lock of another process. A
    killed process leaves its lock behind. That lock is removed if a run of Plimsoll made it.

    Raises:
        PlimsollError: Another program's lock is older than compiling takes.
        OSError: The directory cannot be written.
    """
    from torch.utils.cpp_extension import _get_build_directory

    directory = Path(_get_build_directory(name, verbose=False))
    lock, mark = directory / "lock", directory / "plimsoll.building"
    with open(directory / "plimsoll.lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # ended by the kernel when its process is killed
        except OSError:  # some clusters' file systems have no locks
            _await(lock, name)
            yield
            return
        if mark.exists():
            lock.unlink(missing_ok=True)
        mark.touch()
        try:
            _await(lock, name)
            yield
        finally:
            mark.unlink()


def _await(lock: Path, name: str) -> None:
    """Wait until the lock is gone; raise PlimsollError if it is older than compiling takes."""
    with suppress(FileNotFoundError):
        while (age := time.time() - lock.stat().st_mtime) <= MOST_SECONDS:
            time.sleep(1.0)
        raise PlimsollError(
            f"{lock} has been there for {age / 60:.0f} minutes: a process that compiled "
            f"DeepSpeed's {name} was probably killed, and left it. If no other run on this "
            "machine is starting just now, remove the file and try again"
        )


def compiler_errors(output: str) -> str:
    """Return the first lines of a failed build that say why, without the commands around them."""
    lines = [line.strip() for line in output.splitlines()]
    error_lines = [line for line in lines if "error" in line or "not found" in line]
    return "\n  ".join(error_lines[:_SHOWN_LINES]) or output
