"""The commands to begin with: the demo, a first config, completion in the shell and vLLM."""

from __future__ import annotations

import shlex
import sys
import time
from argparse import SUPPRESS
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING

from plimsoll.cli.options import Parser, show
from plimsoll.errors import ConfigError, Interrupted, StageFailed
from plimsoll.run.output import silence

if TYPE_CHECKING:
    from argparse import Namespace


_QUESTIONS = {
    "model": ("Which model? A directory, or a name on the hub", "Qwen/Qwen2.5-0.5B-Instruct"),
    "data": ("Which data to learn from? A file, a directory, or a name on the hub", None),
    "eval": ("Which held-out data, or how many rows to hold out? Enter for none", ""),
}


def init(words: list[str]) -> None:
    """Write a first config of a job (sft, dpo, grpo, ...) that fits.

    It fits on this machine, or on --cluster: if it would not, the planner changes settings, those
    that change what is learned last. Columns are found by their names; lengths, steps and the
    reward by the rows. What is not given is asked.
    """
    options, flags = _init_parser().parse_with_flags(words)

    from plimsoll.config.files import nearest
    from plimsoll.jobs import JOBS

    if options.job not in JOBS:
        near = nearest(options.job, JOBS)
        raise ConfigError(f"There is no job {options.job!r}.{near} Jobs: {', '.join(JOBS)}.")
    job = JOBS[options.job]
    out = options.out or Path(f"{job.name}.yaml")
    if out.exists():
        raise ConfigError(f"{out} is there already. Give another file: -o FILE.")
    from plimsoll.commands.init import InitRequest, check_given, make_config
    from plimsoll.run.files import write_whole

    for name in _QUESTIONS:
        if given := getattr(options, name):
            check_given(name, given)
    _ask(options, job.name)

    with _divided(options, out) as (data, held_out):
        request = InitRequest(
            options.model, data, held_out, options.cluster, options.host_memory, flags
        )
        text, remarks = make_config(job, request)
    write_whole(out, text)
    show("\n".join(remarks))
    file = shlex.quote(str(out))
    show(
        f"\n{out} is written. Look at it, and then:\n"
        f"  plimsoll plan {file}             # its memory, by role, phase and item\n"
        f"  plimsoll {job.name} {file} --dry-run    # checked with its files; starts nothing\n"
        f"  plimsoll {job.name} {file}"
    )


@contextmanager
def _divided(options: Namespace, out: Path) -> Iterator[tuple[str, str | None]]:
    """Yield the data to learn from and the held-out data, which is None without any.

    For a number of rows to hold out, write both to files beside the config, and remove them after
    an error in the block.
    """
    if not (options.eval or "").isdigit():
        yield options.data, options.eval or None
        return
    from plimsoll.commands.init_rows import hold_out

    files = [out.with_name(f"{out.stem}-{name}.jsonl") for name in ("train", "eval")]
    if there := next(filter(Path.exists, files), None):
        raise ConfigError(f"{there} is there already, and --eval would write it. Rename it.")
    try:
        hold_out(options.data, int(options.eval), *files)
        show(f"{options.eval} rows are held out: {files[1]}; the others are in {files[0]}")
        yield str(files[0]), str(files[1])
    except BaseException:
        for file in files:
            file.unlink(missing_ok=True)
        raise


def _init_parser() -> Parser:
    parser = Parser(
        "init",
        init.__doc__,
        takes="JOB [--model M] [--data FILE]",
        epilog="Example: plimsoll init grpo --model Qwen/Qwen2.5-1.5B-Instruct --data train.jsonl",
    )
    parser.add_argument("job", help="the command that the config is for, such as sft")
    parser.add_argument("--model", help="a directory in Hugging Face format, or a name on the hub")
    parser.add_argument("--data", help="a file or directory, or a name on the hub")
    parser.add_argument(
        "--eval",
        metavar="FILE|N",
        help="held-out data, with the same columns; or how many rows of --data to hold out",
    )
    parser.machines()
    parser.path("-o", "--out", metavar="FILE", help="the config; default: JOB.yaml")
    return parser


def _ask(options: Namespace, job: str) -> None:
    """Ask the user for the missing model and data, and set them in `options`.

    If either is missing, also ask for held-out data. Ask again after an unusable answer.

    Raises:
        ConfigError: there is no terminal.
    """
    missing = [name for name in ("model", "data") if getattr(options, name) is None]
    if not missing:
        return
    if not sys.stdin.isatty():
        lacking = " and ".join(f"--{name}" for name in missing)
        raise ConfigError(
            f"{lacking} {'is' if len(missing) == 1 else 'are'} not given, and there is no terminal "
            f"to ask at. Write `plimsoll init {job} --model MODEL --data FILE`."
        )
    from rich.prompt import Prompt

    from plimsoll.run.console import standard_terminal

    console = standard_terminal()
    for name in (*missing, *(["eval"] if options.eval is None else [])):
        question, default = _QUESTIONS[name]
        shown, answer = bool(default), None
        while answer is None or (default is None and not answer) or not _is_usable(name, answer):
            given = Prompt.ask(question, console=console, default=default, show_default=shown)
            answer = (given or "").strip()
        setattr(options, name, answer)


def _is_usable(name: str, answer: str) -> bool:
    """Return whether the model or data in an answer exists; print the reason if not."""
    from plimsoll.commands.init import check_given

    try:
        if answer:
            check_given(name, answer)
    except ConfigError as error:
        show(str(error))
        return False
    return True


def completion(words: list[str]) -> None:
    """Print what makes a shell complete commands, options, keys and their values."""
    parser = Parser(
        "completion",
        completion.__doc__,
        epilog='bash: eval "$(plimsoll completion bash)" in ~/.bashrc; zsh: the same in '
        "~/.zshrc, after compinit; fish: plimsoll completion fish | source in its config.fish",
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])
    shell = parser.parse_args(words).shell

    from plimsoll.commands.completion import SCRIPTS

    show(SCRIPTS[shell])


def setup_vllm(words: list[str]) -> None:
    """Install the build of vLLM that fits, by pip.

    It goes into the Python environment that this command is of.
    """
    parser = Parser("setup-vllm", setup_vllm.__doc__)
    parser.add_argument(
        "--backend",
        choices=["cpu", "gpu"],
        help="gpu: for CUDA 13 (default: gpu where this machine has an NVIDIA card, else cpu)",
    )
    backend = parser.parse_args(words).backend

    from plimsoll.commands.setup_vllm import setup_vllm as install
    from plimsoll.machine.nvidia import live_cards

    install(backend or ("gpu" if live_cards() else "cpu"))


def demo(words: list[str]) -> None:
    """Make a small task and model, SFT it, improve it by PPO, and show how well."""
    parser = Parser("demo", demo.__doc__)
    written = "where all is written (%(default)s)"
    parser.add_argument("--directory", type=expanduser, default="runs/demo", help=written)
    parser.add_argument("--seed", type=int, default=0, help="of task, model and runs (%(default)s)")
    parser.switch(
        "--files-only", "write data, model and the configs sft, dpo, ppo and grpo; train nothing"
    )
    # What comes before the jobs and after them has a process of its own, too.
    parser.switch("--begin", SUPPRESS)
    parser.add_argument("--end", type=float, help=SUPPRESS)
    options = parser.parse_args(words)
    home = Path(options.directory)
    if not (options.files_only or options.begin or options.end is not None):
        run_stages(options.directory, options.seed)
        return

    from plimsoll.commands.demo import begin, prepare, tell
    from plimsoll.run.console import standard_terminal

    if options.files_only:
        prepare(home, options.seed)
        show(f"{home} is ready. First: plimsoll sft {home}/sft.yaml\n")
    elif options.begin:
        begin(home, options.seed)
    else:
        tell(home, standard_terminal(), options.end)


_TITLES = {
    "sft": "1. supervised fine-tuning",
    "ppo": "2. from there, PPO on Ray, DeepSpeed and vLLM",
    "grpo": "3. from there, GRPO in one process",
}
"""The titles of the jobs, in their order."""


def run_stages(directory: str, seed: int) -> None:
    """Run the demo in a directory: make the files, run the jobs, print the results.

    Each job is a command with a process of its own, so that its memory is its own, as its plan
    counts it. It is supervised as a run is: Ctrl-C saves and stops it, and a fault starts it again.
    This process loads nothing and starts no threads, since each thread of its own could take the
    signals that it waits for.

    Raises:
        StageFailed: a stage ended with an error, which its process has printed.
        Interrupted: a stage was asked to stop, and has saved what it had.
    """
    own = ("demo", "--directory", directory, "--seed", str(seed))
    began = time.monotonic()
    Path(directory).mkdir(parents=True, exist_ok=True)
    _run("preparation", [*own, "--begin"])
    for job, title in _TITLES.items():
        _print_title(title)
        _run(job, [job, f"{directory}/{job}.yaml"])
    _print_title("4. what came of it")
    _run("results", [*own, "--end", f"{time.monotonic() - began:.0f}"])


def _run(stage: str, words: Sequence[str]) -> None:
    from plimsoll.cli.supervisor import supervise

    code = supervise(words)
    if code == Interrupted.exit_code:
        raise Interrupted("The demo is stopped. The same command goes on from there.")
    if code:
        raise StageFailed(
            f"the demo ended in its stage {stage}, with exit code {code}. After a remedy the same "
            "command goes on from there.",
            code,
        )


def _print_title(title: str) -> None:
    """Print a title; go on if the output has no reader, as a run does."""
    try:
        print(f"\n{f' {title} ':-^80}", flush=True)
    except BrokenPipeError:
        silence(sys.stdout.fileno())
