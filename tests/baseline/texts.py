"""What is printed when nothing runs: help of every command and section, dry runs, the doctor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from calls import Call, alone
from configs import JOBS, changed, smallest, text

_COMMANDS = (*JOBS, "eval", "export", "merge", "plan", "report", "calibrate", "doctor", "demo")
_SECTION = re.compile(r"^([a-z_]+(?:\.[a-z_]+)*):$", re.MULTILINE)

_HERE = {
    "cluster.device": "cpu",
    "cluster.hardware": "cpu",
    "cluster.host_memory": "8GB",
    "cluster.threads": 1,
}
_PLACES: Mapping[str, Mapping[str, object]] = {
    "local": {"cluster.where": "local"},
    "ray": {"cluster.where": "ray", "cluster.ranks": 2},
}


def text_calls(home: Path) -> Iterator[Call]:
    """Writes configs to `home`."""
    folder = home / "texts"
    folder.mkdir()
    for name in ("model", "rows.jsonl", "held_out.jsonl"):
        (folder / name).symlink_to(home / name)
    yield Call("texts/help/plimsoll", ("--help",), folder)
    yield Call("texts/help/version", ("--version",), folder)
    for command in _COMMANDS:
        yield Call(f"texts/help/{command}", (command, "--help"), folder)
    for job in JOBS:
        said = alone(Call("", (job, "--help"), folder))
        for section in dict.fromkeys(_SECTION.findall(said.out)):
            yield Call(f"texts/help/{job}/{section}", (job, "--help", section), folder)
    yield from _dry_runs(folder)
    words = ("doctor", "--directory", str(folder))
    yield Call("texts/doctor", words, folder, {"RECORDED": "1"}, masked=True)
    yield Call("texts/doctor-json", (*words, "--json"), folder, {"RECORDED": "1"}, masked=True)


def _dry_runs(folder: Path) -> Iterator[Call]:
    for job in JOBS:
        for place, changes in _PLACES.items():
            config = changed(smallest(job, "model"), {**_HERE, **changes, "data.max_tokens": 64})
            if job == "ppo":
                engine = "transformers" if place == "local" else "vllm"
                config["rollout"] = {"engine": engine, "sampling": {"max_new_tokens": 16}}
            file = folder / f"{job}-{place}.yaml"
            file.write_text(text(job, config))
            yield Call(f"texts/dry-run/{job}-{place}", (job, file.name, "--dry-run"), folder)
    words = ("ppo", "ppo-ray.yaml", "--cluster.critic_ranks=2", "--rollout.engines=2", "--dry-run")
    yield Call("texts/dry-run/ppo-critic-ranks", words, folder)
    adapted = ("sft", "sft-ray.yaml", "--actor.adapter.rank=4", "--actor.zero.stage=3", "--dry-run")
    yield Call("texts/dry-run/sft-adapter", adapted, folder)
