"""A death is one for want of memory only where something shows it."""

from __future__ import annotations

import pickle

import pytest

from plimsoll.cluster.exit_reason import SILENT, exit_reason, start_error
from plimsoll.config.rollout import RolloutConfig
from plimsoll.errors import WorkerDied
from plimsoll.machine.incident import NodeState, OutOfMemory, Sighting
from plimsoll.rollout.protocol import ENGINE_ENDED, EngineSpec
from plimsoll.rollout.vllm.config import VllmConfig
from plimsoll.run.readings import HostReading, Reading

GB = 10**9
LOGS = "  Logs: /tmp/worker-1.{out,err}"


def node(kills: int | None) -> NodeState:
    return NodeState(64 * GB, 40 * GB, 8 * GB, (), kills)


def sighting(before: int | None, after: int | None, used: int = 10 * GB) -> Sighting:
    """How many the kernel had killed, and how full the node was when it was last read."""
    last = Reading(HostReading("a", GB, GB, used, 64 * GB))
    return Sighting("rank 1", "a", None, node(before), node(after), {}, {"rank 1": last})


def told(why: str, seen: Sighting) -> list[str]:
    error = exit_reason("training rank 1", why, "/tmp/worker-1", seen)
    assert isinstance(error, OutOfMemory | WorkerDied)
    first, *rest = str(error).splitlines()
    assert rest[1:] == [LOGS]
    assert first == (
        f"training rank 1 died for want of {error.incident.where} memory"
        if isinstance(error, OutOfMemory)
        else "training rank 1 died"
    )
    return [type(error).__name__, rest[0].removeprefix("  Why: ")]


def test_a_kill_that_the_kernel_counted_is_one_for_want_of_memory() -> None:
    kernel = "it was killed: the kernel has killed {} here for want of memory since the run began"
    assert told(SILENT, sighting(2, 3)) == ["OutOfMemory", kernel.format("a process")]
    assert told(ENGINE_ENDED, sighting(0, 2)) == ["OutOfMemory", kernel.format("2 processes")]


def test_a_kill_on_a_full_node_is_one_for_want_of_memory() -> None:
    full = "it was killed: 63.0 of 64.0 GB of its node's memory were in use when it was last read"
    assert told(SILENT, sighting(2, 2, 63 * GB)) == ["OutOfMemory", full]
    assert told(SILENT, sighting(None, None, 63 * GB)) == ["OutOfMemory", full]


def test_a_kill_without_evidence_is_not() -> None:
    innocent = (
        f"{SILENT}. The kernel has killed nothing here for want of memory since the run began"
    )
    unknown = f"{SILENT}. Whether memory ran out is not known; `dmesg` on its node shows it"
    assert told(SILENT, sighting(2, 2)) == ["WorkerDied", innocent]
    assert told(SILENT, sighting(None, 3)) == ["WorkerDied", unknown]
    assert told(SILENT, Sighting("rank 1", "a")) == ["WorkerDied", unknown]
    assert told(SILENT, Sighting("rank 1", "a", None, node(2))) == ["WorkerDied", unknown]


def test_a_crash_is_not_even_where_the_kernel_killed_others() -> None:
    crash = "*** SIGSEGV received at time=1"
    assert told(crash, sighting(2, 3, 63 * GB)) == ["WorkerDied", crash]


@pytest.mark.parametrize(
    ("why", "where"),
    [
        ("Ray's memory monitor killed it: 1 worker(s) were killed due to the node running low on "
         "memory", "host"),
        (f"{ENGINE_ENDED} after ValueError: Free memory on device cuda:0 (0.27/79 GiB)", "device"),
        (f"{ENGINE_ENDED} after torch.OutOfMemoryError: CUDA out of memory. Tried to", "device"),
    ],
)  # fmt: skip
def test_who_says_that_it_was_memory_is_believed(why: str, where: str) -> None:
    error = exit_reason("rollout engine 0", why, "/tmp/worker-1", sighting(0, 0))
    assert isinstance(error, OutOfMemory)
    assert (error.incident.where, error.incident.why) == (where, why)
    assert str(error).splitlines()[1:3] == [f"  Why: {why}", LOGS]


def test_the_error_crosses_processes_as_it_is() -> None:
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
def test_vllm_lacks_memory_to_start_where_it_says_so_or_the_kernel_killed(
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
    assert str(error).startswith("rollout engine 1: vLLM could not start")
    assert (error.incident.where if isinstance(error, OutOfMemory) else None) == where
    assert f"{said}\n  Settings: rollout.vllm.memory_share: 0.3, " in told
    assert ("the kernel has killed a process here for want of memory" in told) is killed
