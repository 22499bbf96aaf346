"""Convert a command of OpenRLHF to a config.

The words are read in the same way as OpenRLHF's parser. The version is found by the flags.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from plimsoll.config.problems import invalid
from plimsoll.config.secrets import MASK, is_secret
from plimsoll.config.yaml_tree import write_value
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll_convert.launch import Launch
from plimsoll_convert.openrlhf import (
    FIRST,
    LAST,
    RELEASES,
    Version,
    format_version,
    learning,
    sections,
)
from plimsoll_convert.openrlhf.table import COMMANDS, FLAGS, REMOVED, VersionedFlag
from plimsoll_convert.rules import leave_out_halves
from plimsoll_convert.settings import (
    Assignment,
    Keys,
    Options,
    Remark,
    Setting,
    Typed,
    Value,
    join_words,
    read_settings,
    split_flags,
)
from plimsoll_convert.writer import Converted, differences, write_config

_REFUSED = {
    "serve_rm": "It trains nothing. `plimsoll serve-reward CONFIG` serves a reward model",
    "batch_inference": "It trains nothing. `plimsoll sample CONFIG` samples and scores, `plimsoll "
    "eval` measures",
    "lora_combiner": "It trains nothing. `plimsoll merge ADAPTER --out FOLDER` merges an adapter",
    "interactive_chat": "It trains nothing. `vllm serve` or transformers chat with the model that "
    "a run leaves",
    "train_ppo": "It was removed in 0.6.2; its successor is train_ppo_ray",
    "train_prm": "It reads text in which a placeholder token stands after each step, and labels "
    "beside it; `plimsoll prm` reads lists: columns with the prompt, the steps and a label for "
    "each step. Convert the rows, and begin with `plimsoll init prm`",
}


Versions = tuple[Version, Version]
"""The first and the last version that have all flags of a command; if no version has all flags, the
versions that have the most."""


def command_of_program(program: str) -> str:
    """Return the short name in `COMMANDS` of a program such as `train_ppo_ray`.

    Raises:
        ConfigError: There is no such program, or it cannot be converted.
    """
    for command, name in COMMANDS.items():
        if name == program:
            return command
    if program in _REFUSED:
        raise ConfigError(f"openrlhf.cli.{program} is not read. {_REFUSED[program]}.")
    close = difflib.get_close_matches(program, [*COMMANDS.values(), *_REFUSED], n=1)
    near = f" Did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"OpenRLHF has no program openrlhf.cli.{program}.{near} Read are: "
        f"{', '.join(COMMANDS.values())}."
    )


def _read_options(
    launch: Launch, version: Version | None, cards: int | None
) -> tuple[Options, Versions]:
    """Return the options of a command, and the versions that have its flags.

    Args:
        launch: The command.
        version: Version of OpenRLHF; None to find it by the flags.
        cards: Cards of a machine.

    Raises:
        ConfigError: Flags that the version has not, each with the nearest names, and values that
            cannot be read.
    """
    command = command_of_program(launch.program)
    typed, problems = split_flags(launch.arguments)
    first, last = _find_versions(command, typed, version)
    settings = {
        f"--{name}": _setting(f, command, last) for name, f in _flags(command, last).items()
    }
    given: list[Assignment] = []
    for name, words in typed:
        flag, possible = _match(command, last, name)
        if flag is not None:
            text = join_words(f"--{name}", words)
            given.append((_setting(flag, command, last), f"--{name}", words, text))
            continue
        value = MASK if is_secret(name) else shlex.join(words) or None
        why, fix = _explain_unknown(command, (first, last), name, possible)
        problems.append(invalid(f"--{name}", value, why, fix))
    remedy = "give another value, or leave the flag out"
    o = read_settings(
        command,
        launch,
        settings,
        given,
        remedy,
        problems,
        cards=cards,
        version=last,
        rl=command == "ppo",
        pairs=command in ("rm", "dpo"),
        critic_if="advantage_estimator",
    )
    # its parser, too, takes the last of repeated flags in silence
    return replace(o, remarks=()), (first, last)


def _setting(flag: VersionedFlag, command: str, version: Version) -> Setting:
    """Return the setting that a flag is in one command and version."""
    value = flag.default(command, version)
    default = bool(value) if flag.reader.kind is bool else value
    rest = (flag.absent, flag.keys, flag.convert)
    return Setting(flag.id, (command,), flag.reader, default, *rest)


@cache
def _flags(command: str, version: Version) -> Mapping[str, VersionedFlag]:
    """Return the flags of a command in a version, by name."""
    return {name: flag for flag in FLAGS if (name := flag.name(command, version))}


@cache
def known_flags(command: str) -> tuple[VersionedFlag, ...]:
    """Return the flags that a command has in any version, in the table's order."""
    ids = {flag.id for version in RELEASES for flag in _flags(command, version).values()}
    return tuple(flag for flag in FLAGS if flag.id in ids)


def _match(command: str, version: Version, name: str) -> tuple[VersionedFlag | None, list[str]]:
    """Return the flag of a name or of a unique prefix (else None), and all names that match."""
    flags = _flags(command, version)
    if name in flags:
        return flags[name], [name]
    begun = sorted(whole for whole in flags if name and whole.startswith(name))
    return (flags[begun[0]] if len(begun) == 1 else None), begun


def _explain_unknown(
    command: str, versions: Versions, name: str, possible: Sequence[str]
) -> tuple[str, str]:
    """Return (reason, remedy) for a name that is no flag."""
    first, newest = versions
    flags = _flags(command, newest)
    close = difflib.get_close_matches(name, flags, n=3) or possible[:3]
    fix = f"did you mean {' or '.join(f'--{near}' for near in close)}?" if close else "leave it out"
    if possible:
        return f"It may be {' or '.join(f'--{whole}' for whole in possible[:4])}.", fix
    program = COMMANDS[command]
    exist = [v for v in RELEASES if _match(command, v, name)[0] is not None]
    if name in REMOVED and (not exist or exist[-1] < newest):
        since, successor = REMOVED[name]
        now = next((n for n, flag in flags.items() if flag.id == successor), successor)
        if not now:
            return f"It was removed in {since}, and has no successor.", "leave it out"
        return f"It was removed in {since}; its successor is --{now}.", f"write --{now}"
    if exist:
        what = f"{program} has it from {format_version(exist[0])} to {format_version(exist[-1])}"
        last = format_version(newest)
        if first == newest:
            return f"{what}, and this is {last}.", fix
        return f"{what}, and the other flags are those of {format_version(first)} to {last}.", fix
    also = [COMMANDS[c] for c in COMMANDS if any(name in _flags(c, v) for v in RELEASES)]
    releases = f"{format_version(FIRST)} to {format_version(LAST)}"
    why = f"No {program} of OpenRLHF {releases} has it"
    return (f"{why}; {' and '.join(also)} has." if also else f"{why}."), fix


def _find_versions(command: str, typed: Sequence[Typed], version: Version | None) -> Versions:
    """Return the versions that have the most of the typed flags; only `version` if it is given."""
    exist = [v for v in RELEASES if _flags(command, v)]
    if version is not None:
        if version not in exist:
            raise ConfigError(
                f"OpenRLHF {format_version(version)} has no {COMMANDS[command]}: it is in "
                f"{format_version(exist[0])} to {format_version(exist[-1])}."
            )
        return version, version
    counts = {v: sum(_match(command, v, name)[0] is not None for name, _ in typed) for v in exist}
    fitting = [v for v in exist if counts[v] == max(counts.values())]
    return fitting[0], fitting[-1]


_WITH_DEFAULTS = ("reward_clip_range", learning.CORRECTION_FLAGS[-1])
"""Flags that have an effect even if they are not typed."""


def convert(launch: Launch, version: Version | None = None, cards: int | None = None) -> Converted:
    """Return a config that has the same meaning as an OpenRLHF command.

    Args:
        launch: The command.
        version: Version of OpenRLHF; None to find it by the flags.
        cards: Number of cards per machine, if the command does not say it.

    Raises:
        ConfigError: Flags cannot be read, Plimsoll cannot do what they say, or the config is wrong.
        SettingsConflict: Settings cannot work together.
    """
    options, (first, last) = _read_options(launch, version, cards)
    converted = _convert(options)
    if first == last:
        return converted
    since = format_version(first)
    try:
        older = _convert(_read_options(launch, first, cards)[0])
        changed = [f"{k}: {write_value(v)}" for k, v in differences(converted, older).items()]
        how = f"--version {since} would mean {', '.join(changed)}."
        note = how if changed else "They mean the same in all of them."
    except PlimsollError:
        note = f"As one of {since} it is refused: --version says which it is."
    span = f"The flags are those of {since} to {format_version(last)}."
    return replace(converted, version_note=f"{span} {note}")


def _convert(o: Options) -> Converted:
    """Return the config of a command in the version of its options."""
    if o["pretrain"] is None:
        raise ConfigError(f"{o.names['pretrain']} is needed: the model to train.")
    models = learning.reward_models(o)
    several = {f"model_{i}": model for i, model in enumerate(models, 1)}
    averaged = o.trace_if(o["enable_ema"], o["ema_beta"], "ema_beta", "enable_ema")
    run: dict[str, Keys | Value | Remark] = {
        "cluster": sections.machines(o, len(models)),
        "actor": {**sections.trained_role(o, "actor"), "ema.decay": averaged},
        "critic": sections.critic(o),
        "reference": sections.reference(o),
        "teacher": sections.teacher(o),
        "reward_model": models[0] if len(models) == 1 else None,
        "reward_models": several if len(models) > 1 else {},
        "rewards": learning.rewards(o),
        "environments": learning.agents(o),
        "data": sections.data(o),
        "batch": sections.batch(o),
        "rollout": sections.rollout(o) if o.rl else None,
        "rollout.sampling.max_new_tokens": sections.response_length(o) if o.rl else None,
        "eval_sampling": sections.eval_sampling(o) if o.rl else None,
        "algorithm": learning.algorithm(o),
        "run": sections.run(o),
    }
    why = {flag: reason for flags, reason in _lacking(o).items() for flag in flags.split()}
    given = (f for f in why if f in o.typed or (f in _WITH_DEFAULTS and f in o.values))
    run |= {"half": leave_out_halves(o, "param_dtype")}
    run |= {f"left_out.{flag}": Remark("lacking", flag, why[flag]) for flag in given}
    about = f"OpenRLHF {format_version(o.version)}, {COMMANDS[o.command]}"
    return write_config(learning.job(o), run, o, about)


def _lacking(o: Options) -> dict[str, str]:
    """Return the reasons why flags are left out, by flag ids (several ids separated by blanks)."""
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
    correction, parts = learning.correction_of(o), learning.scored_parts(o)
    if learning.estimator(o) in ("gae", "reinforce_pp", "reinforce_pp_baseline"):
        why["no_advantage_std_norm"] = "advantages are centred and scaled, or neither"
    if o["policy_loss_type"] == "gspo":
        why["dual_clip"] = "gspo has no dual clip"
    if reason := learning.why_uncorrected(o):
        why[" ".join(learning.CORRECTION_FLAGS)] = reason
    elif correction is not None and correction[1] == "clip" and correction[3] > 0:
        why[learning.CORRECTION_FLAGS[-1]] = (
            f"weights below {correction[3]:g} are raised to it there; here they stay"
        )
    if (o["vllm_generate_batch_size"] or 0) > o["rollout_batch_size"]:
        why["vllm_generate_batch_size"] = "no more is sampled than is learned"
    if not (o["agent_func_path"] or o["remote_rm_url"]):
        why["normalize_reward"] = "scores are as the model gives them: reward_model.weight divides"
        if sections.shares_critics_cards(o):
            why["colocate_critic_reward"] = (
                "reward models are on the actor's ranks, or on ranks of their own "
                "(cluster.reward_ranks), not on the critic's"
            )
    if o["value_head_prefix"] != "score":
        why["value_head_prefix"] = "a head is saved and read as `score`"
    if not parts:
        why["stop_properly_penalty_coef"] = "functions and servers alone have such a factor"
        if learning.clips_rewards(o):
            why["reward_clip_range"] = "rewards of models and agents are not clipped"
    return why
