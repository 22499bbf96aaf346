"""The commands that make a machine ready."""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path

from plimsoll.cli.options import Parser, show


def setup_vllm(words: list[str]) -> None:
    """Run `plimsoll setup-vllm` with these words."""
    parser = Parser(
        "setup-vllm",
        description="Install the build of vLLM that fits, by pip, into the Python environment that "
        "this command is of.",
    )
    parser.add_argument(
        "--backend",
        choices=["cpu", "gpu"],
        help="gpu: for CUDA 13 (default: gpu where this machine has an NVIDIA card, else cpu)",
    )
    backend = parser.parse_args(words).backend

    from plimsoll.commands.setup_vllm import setup_vllm as install
    from plimsoll.machine.nvidia import live_cards

    install(backend or ("gpu" if live_cards() else "cpu"))


def setup_verifiers(words: list[str]) -> None:
    """Run `plimsoll setup-verifiers` with these words."""
    parser = Parser(
        "setup-verifiers",
        description="Make the virtual environment that verifiers has to itself, and install it "
        "there with the packages of its environments. Run again, it goes on, or adds packages.",
    )
    parser.add_argument(
        "--package",
        action="append",
        default=[],
        metavar="NAME",
        help="of an environment, as pip takes it: a name, a folder, a URL; may come several times",
    )
    parser.add_argument(
        "--directory",
        type=expanduser,
        help="default: beside Plimsoll's own virtual environment, or as PLIMSOLL_VERIFIERS says",
    )
    parser.add_argument("--python", type=expanduser, help="make it of this Python; default: this")
    options = parser.parse_args(words)

    from plimsoll.interop.verifiers.setup import set_up

    directory = None if options.directory is None else Path(options.directory).absolute()
    show(set_up(directory, options.package, options.python))


def verifiers_tasks(words: list[str]) -> None:
    """Run `plimsoll verifiers-tasks` with these words."""
    parser = Parser(
        "verifiers-tasks",
        usage="plimsoll verifiers-tasks NAME --out FILE [--section.key VALUE ...] [options]",
        description="Write the tasks of an environment of verifiers to a file of data. Dotted "
        "flags are keys of the environment's config, such as --taskset.difficulty easy.",
    )
    parser.add_argument("name", help="TASKSET, or ENVIRONMENT+TASKSET")
    parser.add_argument(
        "--out", type=expanduser, required=True, metavar="FILE", help="JSON lines to write"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="so many tasks; default: all")
    parser.add_argument(
        "--skip", type=int, default=0, metavar="N", help="leave out the first ones (%(default)s)"
    )
    options, flags = parser.parse_with_flags(words)

    from plimsoll.commands.found_models import refuse_existing
    from plimsoll.config.flags import apply_flags, parse_flags
    from plimsoll.config.yaml_tree import Tree
    from plimsoll.interop.verifiers.setup import write_tasks

    keys = apply_flags(Tree({}, {}), parse_flags(flags)).values
    out = Path(options.out)
    refuse_existing("--out", out)
    show(write_tasks(options.name, keys, options.limit, options.skip, out))
