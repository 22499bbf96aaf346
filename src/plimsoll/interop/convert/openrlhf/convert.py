"""Convert a command of OpenRLHF to a config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from plimsoll.config.yaml_tree import write_value
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.interop.convert.foreign import ForeignRun, SamplingSettings
from plimsoll.interop.convert.launch import Launch
from plimsoll.interop.convert.mapping import half_precision_remark
from plimsoll.interop.convert.openrlhf import data, learning, rewards, roles
from plimsoll.interop.convert.openrlhf.arguments import Versions, read_options
from plimsoll.interop.convert.openrlhf.flag import COMMANDS, Version, format_version
from plimsoll.interop.convert.options import Options, Remark
from plimsoll.interop.convert.writer import Converted, differences, write_config

_WITH_DEFAULTS = ("reward_clip_range", learning.CORRECTION_FLAGS[-1])
"""Flags whose defaults ask for something, too."""


def convert(launch: Launch, version: Version | None = None, cards: int | None = None) -> Converted:
    """Return the config that means what a command means.

    Args:
        launch: The command.
        version: Version of OpenRLHF; None to find it by the flags.
        cards: Cards of a machine, if the command does not say it.

    Raises:
        ConfigError: Flags cannot be read, Plimsoll cannot do what they say, or the config is wrong.
        SettingsConflict: Settings cannot work together.
    """
    options, versions = read_options(launch, version, cards)
    converted = _convert(options, versions)
    if versions.first == versions.last:
        return converted
    first, last = format_version(versions.first), format_version(versions.last)
    note = f"The flags are those of {first} to {last}. "
    return replace(converted, version_note=note + _changes(converted, launch, versions, cards))


def _changes(converted: Converted, launch: Launch, versions: Versions, cards: int | None) -> str:
    """Return what the first version that has the flags makes of the command."""
    first = format_version(versions.first)
    try:
        older = _convert(*read_options(launch, versions.first, cards))
    except PlimsollError:
        return f"As one of {first} it is refused: --version says which it is."
    changed = [f"{k}: {write_value(v)}" for k, v in differences(converted, older).items()]
    if not changed:
        return "They mean the same in all of them."
    return f"--version {first} would mean {', '.join(changed)}."


def _convert(o: Options, versions: Versions) -> Converted:
    if o["pretrain"] is None:
        raise ConfigError(f"{o.names['pretrain']} is needed: the model to train.")
    about = f"OpenRLHF {format_version(versions.last)}, {COMMANDS[o.command]}"
    return write_config(learning.job(o), _run(o), o, _remarks(o), about)


def _run(o: Options) -> ForeignRun:
    models = rewards.reward_models(o)
    several = {f"model_{i}": model for i, model in enumerate(models, 1)}
    sampling = SamplingSettings(temperature=o.take("temperature"))
    return ForeignRun(
        machines=roles.machines(o),
        actor=roles.trained_role(o, "actor", o.take("pretrain")),
        critic=roles.critic(o),
        reference=roles.reference(o),
        teacher=roles.teacher(o),
        reward_model=models[0] if len(models) == 1 else None,
        reward_models=several if len(models) > 1 else {},
        rewards=rewards.rewards(o),
        agents=rewards.agents(o),
        data=data.data(o),
        batch=data.batch(o),
        rollout=replace(
            roles.rollout(o),
            sampling=replace(sampling, max_new_tokens=data.response_length(o)),
            eval_sampling=data.eval_sampling(o),
        )
        if o.rl
        else None,
        algorithm=learning.algorithm(o),
        run=data.run(o),
    )


def _remarks(o: Options) -> Iterator[Remark]:
    """Yield remarks on flags that have no counterpart beside the others that are given."""
    yield from half_precision_remark(o, "param_dtype")
    for flags, why in _lacking(o).items():
        for flag in flags.split():
            if flag in o.typed or (flag in _WITH_DEFAULTS and flag in o.values):
                yield Remark("lacking", flag, why)


def _lacking(o: Options) -> dict[str, str]:
    """Return why flags are left out, by their ids."""
    if not o.rl:
        why = {}
        if o["margin_loss"] and o["loss"] != "sigmoid":
            why["margin_loss"] = "OpenRLHF's LogExpLoss leaves margins out; here they count"
        if o["multiturn"]:
            why["output_key"] = "a turn of another column is not joined: write it into the messages"
        if o["eval_dataset"] and "," in o["eval_dataset"]:
            why["eval_dataset"] = "jobs that learn from data have one held-out set; the first"
        return why
    why = {}
    correction, parts = learning.gate(o), rewards.scored_parts(o)
    if learning.estimator(o) in ("gae", "reinforce_pp", "reinforce_pp_baseline"):
        why["no_advantage_std_norm"] = "advantages are centred and scaled, or neither"
    if o["policy_loss_type"] == "gspo":
        why["dual_clip"] = "gspo has no dual clip"
    if reason := learning.why_uncorrected(o):
        why[" ".join(learning.CORRECTION_FLAGS)] = reason
    elif correction is not None and correction.mode == "clip" and correction.low > 0:
        why[learning.CORRECTION_FLAGS[-1]] = (
            f"weights below {correction.low:g} are raised to it there; here they stay"
        )
    if (o["vllm_generate_batch_size"] or 0) > o["rollout_batch_size"]:
        why["vllm_generate_batch_size"] = "no more is sampled than is learned"
    if not (o["agent_func_path"] or o["remote_rm_url"]):
        why["normalize_reward"] = "scores are as the model gives them: reward_model.weight divides"
    if o["value_head_prefix"] != "score":
        why["value_head_prefix"] = "a head is saved and read as `score`"
    if not parts:
        why["stop_properly_penalty_coef"] = "functions and servers alone have such a factor"
        if rewards.clips(o):
            why["reward_clip_range"] = "rewards of models and agents are not clipped"
    return why
