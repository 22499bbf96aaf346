"""The jobs by the names of their commands, in the order of the help. Add a new job here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plimsoll.jobs.distill import JOB as DISTILL
from plimsoll.jobs.dpo import JOB as DPO
from plimsoll.jobs.kto import JOB as KTO
from plimsoll.jobs.prm import JOB as PRM
from plimsoll.jobs.rl import JOB as RL
from plimsoll.jobs.rm import JOB as RM
from plimsoll.jobs.sample import JOB as SAMPLE
from plimsoll.jobs.sft import JOB as SFT
from plimsoll.resolve.job import Job

_PRESETS: list[Job[Any]] = [
    replace(RL, name=p.name, summary=p.summary, preset=p.name, start={**RL.start, **p.start})
    for p in RL.presets.values()
]

_ALL: list[Job[Any]] = [SFT, DISTILL, RM, PRM, DPO, KTO, RL, *_PRESETS, SAMPLE]

JOBS: Mapping[str, Job[Any]] = {job.name: job for job in _ALL}
"""All jobs by the names of their commands. Each preset of a job is a command too."""
