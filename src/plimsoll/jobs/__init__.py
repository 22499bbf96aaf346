"""The jobs, by the names of their commands, in the order of the help. A new one is added here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plimsoll.jobs.distill import JOB as DISTILL
from plimsoll.jobs.dpo import JOB as DPO
from plimsoll.jobs.kto import JOB as KTO
from plimsoll.jobs.prm import JOB as PRM
from plimsoll.jobs.rl import JOB as PPO
from plimsoll.jobs.rm import JOB as RM
from plimsoll.jobs.sft import JOB as SFT
from plimsoll.spec.job import Job

JOBS: Mapping[str, Job[Any]] = {job.name: job for job in (SFT, DISTILL, RM, PRM, DPO, KTO, PPO)}
