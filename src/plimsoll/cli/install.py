"""The commands that make a machine ready."""

from __future__ import annotations

from plimsoll.cli.options import Parser


def setup_vllm(words: list[str]) -> None:
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
