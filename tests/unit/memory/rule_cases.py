"""What the tests of the plan's rules ask: which problems some settings meet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from plimsoll.config.load import validate
from plimsoll.config.problems import Problem
from plimsoll.config.run import JobConfig
from plimsoll.config.yaml_tree import read_tree
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import spec_of
from plimsoll.machine.hardware import parse_cluster
from plimsoll.machine.local_host import LocalHost
from plimsoll.memory.contents.contents import make_job
from plimsoll.memory.contents.overheads import Constants
from plimsoll.memory.rules import find_conflicts

QWEN = "Qwen/Qwen2.5-7B"


def config(job: str, changes: Mapping[str, Any]) -> JobConfig:
    """changes: by dotted key, over the smallest config of the job."""
    tree: dict[str, Any] = {
        "run": {"directory": "out", "steps": 10},
        "data": {"train": {"path": "x", "prompt": "q", "response": "a"}, "max_tokens": 512},
        "actor": {"model": {"path": QWEN}, "zero": {"stage": 3}},
    }
    if job == "dpo":
        tree["data"]["train"] = {"path": "x", "chosen": "a", "rejected": "b"}
    if job == "ppo":
        tree["critic"] = {"model": {"path": QWEN}, "zero": {"stage": 3}}
        tree["data"]["train"] = {"path": "x", "prompt": "q"}
        tree["rewards"] = {"r": {"name": "length"}}
    for key, value in changes.items():
        *path, last = key.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    config: JobConfig = validate(JOBS[job].config, read_tree(json.dumps(tree), f"{job}.yaml"))
    return config


def conflicts(
    job: str,
    changes: Mapping[str, Any],
    cluster: str = "8xA100-80GB",
    here: LocalHost | None = None,
) -> dict[str, Problem]:
    """By code."""
    read = config(job, {"cluster.hardware": cluster, **changes})
    hardware = parse_cluster(cluster, read.cluster.nodes, 10**12)
    found = find_conflicts(make_job(spec_of(read), hardware, Constants()), here)
    return {problem.code: problem for problem in found if problem.code is not None}
