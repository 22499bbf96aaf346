"""Write the messages that say where a trained model is and how to use it."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

from plimsoll.config.engine import ModelConfig
from plimsoll.resolve.run_spec import RunSpec


def policy_use(path: Path) -> str:
    """Return a message part on how to use a language model."""
    return f"transformers and vLLM load it (`vllm serve {quote(str(path))}`)"


def scorer_use(*, steps: bool) -> str:
    """Return a message part on how to use a reward model.

    If `steps` is set, the model scores the steps of a solution.
    """
    if steps:
        return "transformers loads it: AutoModelForTokenClassification scores the steps"
    return (
        "`plimsoll ppo` takes it as reward_model.role.model.path, and transformers loads it "
        "(AutoModelForSequenceClassification)"
    )


def actor_use(spec: RunSpec[Any], path: Path, *, adapter: bool) -> tuple[str, str]:
    """Return the noun for the trained model, such as "reward model", and how to use the model.

    If `adapter` is set, the files in `path` hold an adapter only.
    """
    if adapter:
        merging = f"`{_merge_command(spec.actor.model, path)}`"
        return "adapter", f"a plain model of it and its base: {merging}"
    if spec.sender.head != "value":
        return "model", policy_use(path)
    noun = "process reward model" if spec.job.has_steps else "reward model"
    return noun, scorer_use(steps=spec.job.has_steps)


def trained_text(spec: RunSpec[Any], run: Path, path: Path) -> str:
    """Return the message on a run's final model: where it is, and how to use it.

    With held-out rows, a second line says how to measure the model on them.
    """
    adapter = spec.actor.adapter is not None
    noun, use = actor_use(spec, path, adapter=adapter)
    lines = [f"the {noun} is in {path}: {use}"]
    if spec.data.eval is not None:
        merged = " --model DIRECTORY" if adapter else ""
        lines.append(f"to measure it on data.eval: `plimsoll eval {quote(str(run))}{merged}`")
    return "\n".join(lines)


def _merge_command(base: ModelConfig, adapter: Path) -> str:
    words = f"plimsoll merge {quote(str(adapter))} --out DIRECTORY"
    if base.quantization != "none":
        words += f" --quantization {base.quantization}"
        words += "" if base.double_quantization else " --no-double-quantization"
    return f"{words} --trust-remote-code" if base.trust_remote_code else words
