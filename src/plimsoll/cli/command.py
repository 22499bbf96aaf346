"""The command `plimsoll`. It reads and checks everything before it imports anything heavy.

Exit codes: 0 done; 2 wrong usage, config or input; 3 does not fit; 4 settings that cannot work
together; 130 stopped by Ctrl-C or SIGTERM; 141 the reader of the output has gone; 1 anything else.
An error is one readable block on stderr, and a requested stop is one line there; `--debug` adds the
traceback.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import EntryPoints, entry_points
from io import TextIOWrapper
from types import TracebackType
from typing import TYPE_CHECKING, Any

from plimsoll import __version__
from plimsoll.cli import first, tools
from plimsoll.cli.jobs import run_job
from plimsoll.cli.options import ReaderGone, show
from plimsoll.config.files import nearest, usable_paths
from plimsoll.errors import ConfigError, Interrupted, PlimsollError
from plimsoll.machine.heap import restart_with_jemalloc
from plimsoll.machine.host import thread_wait_settings
from plimsoll.machine.nvidia import card_order
from plimsoll.rl.presets import PRESETS
from plimsoll.run.ending import notes_of
from plimsoll.run.output import open_missing, safe_streams, say
from plimsoll.run.phases import VARIABLE

if TYPE_CHECKING:
    from plimsoll.resolve.job import Job

_INTERRUPTED = 130
_READER_GONE = 141  # the code that shells expect after SIGPIPE

_OF_A_RANK = {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}

_HELP = """\
Plimsoll: RLHF that knows its load line.

  plimsoll demo                     the whole story, in minutes on a CPU
  plimsoll init JOB                 a first config that fits on this machine
{jobs}
  plimsoll eval CONFIG|RUN          how good a model is on held-out rows
  plimsoll export RUN --to DIR      a checkpoint as a model that others load
  plimsoll merge ADAPTER --out DIR  an adapter and its base as one plain model
  plimsoll try-reward CONFIG        the rewards of a config on the first rows
  plimsoll serve-reward CONFIG      the rewards of a config, over HTTP
  plimsoll plan CONFIG.yaml         will it fit? every byte by role, phase, item
  plimsoll watch RUN...             a live page of runs: curves, samples, memory
  plimsoll report RUN               predicted and measured memory, and curves
  plimsoll rollouts RUN             what was sampled, group by group
  plimsoll check-bundle FILE        a step of a run, computed again elsewhere
  plimsoll explain-gap CONFIG       why engines and trainer disagree, by trying
  plimsoll calibrate RUN...         fit the plan's constants to this machine
  plimsoll doctor                   what is wrong here, and how to mend it
  plimsoll from-openrlhf SCRIPT     a config of what OpenRLHF was started with
  plimsoll from-trl, from-verl      the same of TRL's and verl's commands
  plimsoll completion SHELL         completion of keys and options by Tab
  plimsoll setup-vllm               install vLLM's build for this machine

  --dry-run    print the resolved config, what would run where, and the plan;
               start nothing
  --force      start a run that the plan says does not fit
  --debug      show the traceback of an error
  --help       this; `plimsoll ppo --help` lists every key of a config,
               `plimsoll ppo --help actor.zero` those of a section
  --version    print the version

Each key of a config can be given as a flag, such as `--run.steps 100`, which
wins over the file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit code; default arguments: sys.argv[1:]."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    if arguments is None:  # the process is ours
        if _is_run(words) and VARIABLE not in os.environ:
            from plimsoll.cli.supervisor import supervise

            return supervise(words)
        _prepare(words, debug)
    try:
        with usable_paths(), safe_streams():
            _dispatch([word for word in words if word != "--debug"])
    except (PlimsollError, UnicodeEncodeError, KeyboardInterrupt) as error:
        if debug:
            say(traceback.format_exc())
        text, code = _describe_error(error)
        say(text)
        return code
    except ReaderGone:
        return _READER_GONE
    return 0


def _is_run(words: Sequence[str]) -> bool:
    """Return whether words start a run: a job's name, without an option that only prints."""
    only_prints = {"-h", "--help", "--dry-run", "--version"}
    return (
        bool(words)
        and words[0] not in {*_TOOLS, "complete"}
        and not only_prints.intersection(words)
        and words[0] not in _added_commands().names
    )


def _describe_error(
    error: PlimsollError | UnicodeEncodeError | KeyboardInterrupt,
) -> tuple[str, int]:
    """Return the message of an error, and the exit code."""
    match error:
        case Interrupted():
            return str(error), error.exit_code
        case PlimsollError():
            return "\n".join([f"error: {error}", *notes_of(error)]), error.exit_code
        case UnicodeEncodeError():
            text = (
                f"error: {error.object!r} cannot be written in {error.encoding}. Plimsoll's names "
                "and texts are UTF-8: run it with PYTHONUTF8=1, or in a UTF-8 locale such as "
                "LC_ALL=C.UTF-8; and rename what has a name of other bytes."
            )
            return text, ConfigError.exit_code
    return "interrupted", _INTERRUPTED


def _prepare(words: list[str], debug: bool) -> None:
    open_missing()
    if words and not words[0].startswith("-") and not _is_light(words[0]):
        restart_with_jemalloc()
        _leave_launcher()
        os.environ.update(thread_wait_settings() | card_order())
    os.environ["MPLBACKEND"] = "agg"  # commands inherit a notebook's backend, which is not here
    # As Ctrl-C does: half-written files are removed, and other processes are ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if isinstance(sys.stdout, TextIOWrapper):  # show characters that its encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.excepthook = partial(_show_unexpected, debug=debug)


def _is_light(command: str) -> bool:
    """Return whether a command trains and samples nothing, as no command of other packages does.

    Those are looked up last: it takes 0.1 s.
    """
    light = {"complete", *_TOOLS} - _HEAVY
    return command in light or command in _added_commands().names


def _leave_launcher() -> None:
    """Delete the environment variables that torchrun or mpirun set for this process.

    This command starts its ranks itself. With these variables, torch would look for torchrun's
    store instead of opening one, and DeepSpeed would stop because its rank differs from mpirun's
    (torch/distributed/rendezvous.py, deepspeed/runtime/engine.py).
    """
    for name in list(os.environ):
        if name in _OF_A_RANK or name.startswith(("TORCHELASTIC_", "OMPI_COMM_WORLD_")):
            del os.environ[name]


def _dispatch(words: list[str]) -> None:
    for word in words:
        word.encode()  # refuses a name of other bytes than UTF-8's before anything is written
    if not words or words[0] in ("-h", "--help"):
        lines = (f"  plimsoll {f'{j.name} CONFIG.yaml':<24} {j.summary}" for j in _jobs().values())
        show(_HELP.format(jobs="\n".join(lines)))
    elif words[0] == "--version":
        show(f"plimsoll {__version__}")
    elif words[0] == "complete":
        from plimsoll.commands.completion import candidates

        print(*candidates(words[1:], _commands(), _options), sep="\n")
    elif words[0] in _TOOLS:
        _TOOLS[words[0]](words[1:])
    elif words[0] in _jobs():
        run_job(words[0], words[1:])
    elif words[0] in (added := _added_commands()).names:
        added[words[0]].load()(words[1:])
    elif hint := hint_about(words[0]):
        raise ConfigError(hint)
    else:
        commands = _commands()
        what = "option" if words[0].startswith("-") else "command"
        near = nearest(words[0], [*commands, "--help", "--version"])
        known = "`plimsoll --help` lists them." if near else f"Commands: {', '.join(commands)}."
        raise ConfigError(f"There is no {what} {words[0]!r}.{near} {known}")


def _jobs() -> Mapping[str, Job[Any]]:
    from plimsoll.jobs import JOBS

    return JOBS


def _commands() -> list[str]:
    return list(
        dict.fromkeys(["demo", "init", *_jobs(), *_TOOLS, *sorted(_added_commands().names)])
    )


@cache
def _added_commands() -> EntryPoints:
    """Return the commands of other packages, such as the converters of `plimsoll_convert`."""
    return entry_points(group="plimsoll.commands")


def _options(command: str) -> list[str]:
    """Return the options (`--name`) in the help of a command."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit, PlimsollError):
        _dispatch([command, "--help"])
    return re.findall(r"(?<![\w-])--[a-z][a-z-]*(?![\w.-])", printed.getvalue())


_TOOLS: Mapping[str, Callable[[list[str]], None]] = {
    "demo": first.demo,
    "init": first.init,
    "eval": tools.evaluate,
    "plan": tools.plan,
    "report": tools.report,
    "rollouts": tools.rollouts,
    "check-bundle": tools.check_bundle,
    "explain-gap": tools.explain_gap,
    "calibrate": tools.calibrate,
    "doctor": tools.doctor,
    "merge": tools.merge,
    "export": tools.export,
    "serve-reward": tools.serve_reward,
    "try-reward": tools.try_reward,
    "setup-vllm": first.setup_vllm,
    "watch": tools.watch,
    "completion": first.completion,
}
_HEAVY = {"eval", "explain-gap", "merge", "export", "serve-reward"}
"""Tools that load models in their process. The others need no restart with jemalloc."""


def _show_unexpected(
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    *,
    debug: bool = False,
) -> None:
    """Print an error that has no handler (Python then ends with exit code 1)."""
    if debug:
        say("".join(traceback.format_exception(kind, error, trace)))
        return
    last = traceback.extract_tb(trace)[-1:]
    place = f" at {last[0].filename}:{last[0].lineno}" if last else ""
    where = notes_of(error) or ["Run the command again with --debug for the traceback."]
    text = f"error: unexpected {kind.__name__}: {error}{place}"
    say("\n".join([text, *where]))


_ADVANTAGES = ("reinforce", "reinforce_pp_baseline", "remax", "gdpo", "batch_mean")
_PARTS = {
    **dict.fromkeys(_ADVANTAGES, ("an advantage", "rl", "algorithm.advantage.name")),
    **dict.fromkeys(("sapo", "dppo_tv"), ("a policy loss", "rl", "algorithm.policy_loss.name")),
    **dict.fromkeys(("orpo", "simpo", "ipo", "cpo"), ("a loss", "dpo", "algorithm.loss.name")),
}
"""Functions of algorithm/ that are no command: the kind of each, its job, and its key there."""


def hint_about(word: str) -> str | None:
    """Return a hint about a method that was typed as a command; None for any other word."""
    name = word.lower().replace("++", "_pp").replace("-", "_")
    if name in PRESETS:
        return f"{word!r} is the command {name!r}: write `plimsoll {name} CONFIG.yaml`."
    if name not in _PARTS:
        return None
    what, job, key = _PARTS[name]
    return (
        f"{word!r} is no command of its own, but {what} of `plimsoll {job}`: write `plimsoll {job} "
        f"CONFIG.yaml --{key} {name}`, or {key}: {name} in the config."
    )
