"""What a command says of a model that it has written: where it is, and how it is used."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

from plimsoll.config.model import ModelConfig
from plimsoll.spec.run_spec import RunSpec


def policy_use(path: Path) -> str:
    """Of a language model."""
    return f"transformers and vLLM load it (`vllm serve {_shown(path)}`)"


def scorer_use(*, steps: bool) -> str:
    """Of a reward model; steps: of one that scores steps."""
    if steps:
        return "transformers loads it: AutoModelForTokenClassification scores the steps"
    return (
        "`plimsoll ppo` takes it as reward_model.role.model.path, and transformers loads it "
        "(AutoModelForSequenceClassification)"
    )


def actor_use(spec: RunSpec[Any], path: Path, *, adapter: bool) -> str:
    """Of what a run has trained. adapter: it is written as an adapter alone."""
    if adapter:
        return f"a plain model of it and its base: `{_merge(spec.actor.model, path)}`"
    if spec.roles["actor"].head == "value":
        return scorer_use(steps=spec.job.has_steps)
    return policy_use(path)


def actor_noun(spec: RunSpec[Any], *, adapter: bool) -> str:
    """What a run has trained, in a word."""
    if adapter:
        return "adapter"
    if spec.roles["actor"].head != "value":
        return "model"
    return "process reward model" if spec.job.has_steps else "reward model"


def trained_text(spec: RunSpec[Any], run: Path, path: Path) -> str:
    """Of the final model of a run, at `path`: a line, and one of how it is measured where the
    config has rows for that."""
    adapter = spec.actor.adapter is not None
    noun, use = actor_noun(spec, adapter=adapter), actor_use(spec, path, adapter=adapter)
    lines = [f"the {noun} is in {path}: {use}"]
    if spec.data.eval is not None:
        merged = " --model DIRECTORY" if adapter else ""
        lines.append(f"to measure it on data.eval: `plimsoll eval {_shown(run)}{merged}`")
    return "\n".join(lines)


def _merge(base: ModelConfig, adapter: Path) -> str:
    """The command that merges into what the adapter was trained over."""
    words = f"plimsoll merge {_shown(adapter)} --out DIRECTORY"
    if base.quantization != "none":
        words += f" --quantization {base.quantization}"
        words += "" if base.double_quantization else " --no-double-quantization"
    return f"{words} --trust-remote-code" if base.trust_remote_code else words


def _shown(path: Path) -> str:
    """As a shell takes it."""
    return quote(str(path))
