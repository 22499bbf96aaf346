"""A death is one for want of memory only where something shows it."""

from __future__ import annotations

import pickle

import pytest

from plimsoll.cluster.exit_reason import SILENT, exit_reason, start_error
from plimsoll.config.rollout import RolloutConfig
from plimsoll.errors import WorkerDied
from plimsoll.machine.incident import NodeState, OutOfMemory, Sighting
from plimsoll.run.readings import HostReading, Reading
from plimsoll.sampler.protocol import ENGINE_ENDED, EngineSpec
from plimsoll.sampler.vllm.config import VllmConfig

GB = 10**9
LOGS = "  Logs: /tmp/worker-1.{out,err}"


def node(kills: int | None) -> NodeState:
    return NodeState(64 * GB, 40 * GB, 8 * GB, (), kills)


def sighting(before: int | None, after: int | None, used: int = 10 * GB) -> Sighting:
    """Return how many the kernel had killed, and how full the node was when it was last read."""
    last = Reading(HostReading("a", GB, GB, used, 64 * GB))
    return Sighting("rank 1", "a", None, node(before), node(after), {}, {"rank 1": last})


def told(why: str, seen: Sighting) -> tuple[str, str]:
    """Return the type of the error and the reason that it gives."""
    error = exit_reason("training rank 1", why, "/tmp/worker-1", seen)
    assert isinstance(error, OutOfMemory | WorkerDied)
    first, reason, *rest = str(error).splitlines()
    assert rest == [LOGS] and first.startswith("training rank 1 died")
    if isinstance(error, OutOfMemory):
        assert f" {error.incident.where} memory" in first
    return type(error).__name__, reason.removeprefix("  Why: ")


@pytest.mark.parametrize(
    ("why", "seen", "evidence"),
    [
        (SILENT, sighting(2, 3), "the kernel has killed a process "),
        (ENGINE_ENDED, sighting(0, 2), "the kernel has killed 2 processes "),
        (SILENT, sighting(2, 2, 63 * GB), "63.0 of 64.0 GB "),
        (SILENT, sighting(None, None, 63 * GB), "63.0 of 64.0 GB "),
    ],
)
def test_a_kill_with_evidence_is_out_of_memory(why: str, seen: Sighting, evidence: str) -> None:
    kind, reason = told(why, seen)
    assert kind == "OutOfMemory" and reason.startswith(f"it was killed: {evidence}")


@pytest.mark.parametrize(
    ("seen", "known"),
    [
        (sighting(2, 2), True),
        (sighting(None, 3), False),
        (Sighting("rank 1", "a"), False),
        (Sighting("rank 1", "a", None, node(2)), False),
    ],
)
def test_a_kill_without_evidence_is_a_death(seen: Sighting, known: bool) -> None:
    """Where the kernel's count is not known, the reason names the command that shows it."""
    kind, reason = told(SILENT, seen)
    assert kind == "WorkerDied" and reason.startswith(f"{SILENT}. ")
    assert ("`dmesg`" not in reason) == known


def test_a_crash_is_a_death_even_if_the_kernel_killed_others() -> None:
    crash = "*** SIGSEGV received at time=1"
    assert told(crash, sighting(2, 3, 63 * GB)) == ("WorkerDied", crash)


@pytest.mark.parametrize(
    ("why", "where"),
    [
        ("Ray's memory monitor killed it: 1 worker(s) were killed due to the node running low on "
         "memory", "host"),
        (f"{ENGINE_ENDED} after ValueError: Free memory on device cuda:0 (0.27/79 GiB)", "device"),
        (f"{ENGINE_ENDED} after torch.OutOfMemoryError: CUDA out of memory. Tried to", "device"),
    ],
)  # fmt: skip
def test_a_message_about_memory_is_out_of_memory(why: str, where: str) -> None:
    error = exit_reason("rollout engine 0", why, "/tmp/worker-1", sighting(0, 0))
    assert isinstance(error, OutOfMemory)
    assert (error.incident.where, error.incident.why) == (where, why)
    assert str(error).splitlines()[1:3] == [f"  Why: {why}", LOGS]


def test_the_error_can_be_pickled() -> None:
    error = exit_reason("training rank 1", SILENT, "log", sighting(2, 3))
    assert isinstance(error, OutOfMemory)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(again), again.incident, again.exit_code) == (str(error), error.incident, 1)


@pytest.mark.parametrize(
    ("said", "killed", "where"),
    [
        ("Failed core proc(s): {}", True, "host"),
        ("Failed core proc(s): {}", False, None),
        ("Free memory on device (1/79 GiB) is less than desired", False, "device"),
    ],
)
def test_vllm_that_cannot_start_is_out_of_memory_if_it_says_so_or_the_kernel_killed(
    said: str, killed: bool, where: str | None
) -> None:
    spec = EngineSpec(
        1,
        "model",
        64,
        1,
        "cuda",
        RolloutConfig(dtype="bfloat16").with_engine(VllmConfig(memory_share=0.3)),
    )
    error = start_error(spec, said, killed, "/tmp/worker-1")
    told = error.incident.why if isinstance(error, OutOfMemory) else str(error)
    assert str(error).startswith("rollout engine 1: vLLM ")
    assert (error.incident.where if isinstance(error, OutOfMemory) else None) == where
    why, _, settings = told.partition("\n  Settings: ")
    assert why.endswith(said) and settings.startswith("rollout.vllm.memory_share: 0.3, ")
    assert ("the kernel has killed a process" in why) is killed
