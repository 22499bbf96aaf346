"""Reports and logs as Ray 2.60 and vLLM 0.32 write them, cut down to what a person needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.cluster.exit_reason import (
    SILENT,
    death_reason,
    failing_process,
    last_crash_line,
    message,
    says_out_of_memory,
)
from plimsoll.sampler.vllm.engine import logged_error

KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: RankActor
\tactor_id: 1bedc69c8fa1c899379041f401000000
\tpid: 26362
\tnamespace: a666dad7-555d-4680-b5b3-c2aabf19819d
\tip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes \
include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop \
--force was called, or (3) the worker crashed unexpectedly due to SIGSEGV or another unexpected \
error."""

ENDED = """The actor died unexpectedly before finishing this task.
\tpid: 26332
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker exits unexpectedly. Worker exits with an exit code 3."""

NODE = """The actor died unexpectedly before finishing this task.
\tpid: 462
The actor died because its node has died. Node Id: 5ff27f3c
\tthe actor's node was terminated unexpectedly: health check failed due to missing too many \
heartbeats"""

RAYLET = """The actor d9f80acf is unavailable: The actor is temporarily unavailable: RpcError: RPC \
error: Socket closed rpc_code: 14. The task may or may not have been executed on the actor."""

MONITOR = """\
1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, \
ID: 765923ec) was 9.73GB used / 23.54GB limit (0.413540)
OOM kill reason: Memory usage 10343239680B exceeded threshold of 758295424B (3.0% of 25276514304B \
limit)
Object store memory usage: [- objects spillable: 0"""

DEPENDENT = """ray::EngineActor.call() (pid=26190, ip=192.0.2.2, actor_id=a90287e2)
  At least one of the input arguments for this task could not be computed:
ray.exceptions.RayTaskError: ray::RankActor.call() (pid=26191, ip=192.0.2.3, actor_id=619b2bea)
  File "worker.py", line 5, in weight_bucket
KeyError: 'x'"""

CAUSE = "ValueError: Available memory is less than it"
FAILED_CORE = f"""\
(EngineCore pid=9) WARNING 11-20 23:14:26 [cpu_worker.py:114] libiomp is not found
(EngineCore pid=9) ERROR 11-20 23:14:26 [cpu_worker.py:120] OSError: an earlier one
(EngineCore pid=9) ERROR 11-20 23:14:27 [core.py:1510] EngineCore failed to start.
(EngineCore pid=9) ERROR 11-20 23:14:27 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-20 23:14:27 [core.py:1510]     raise ValueError(
(EngineCore pid=9) ERROR 11-20 23:14:27 [core.py:1510] {CAUSE}
(MainProcess pid=8) ERROR 11-20 23:14:28 [async_llm.py:906] vllm.v1.engine.exceptions.\
EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
(MainProcess pid=8) WARNING 11-20 23:14:28 [utils.py:648] RuntimeError: only a warning
"""


def test_a_killed_process_has_no_further_reason() -> None:
    assert death_reason(KILLED) == SILENT


def test_other_deaths_have_the_reason_that_ray_gives() -> None:
    assert death_reason(ENDED) == ENDED.partition("detail: ")[2]
    assert "(raylet) was killed, or it crashed" in death_reason(
        f"{KILLED}\nOwner's node has crashed."
    )
    long = death_reason("word " * 1000 + "end")
    assert len(long) <= 500 and long.endswith(" end")


def test_a_head_that_cannot_call_back_is_recognised() -> None:
    report = """The actor died unexpectedly before finishing this task.
\tclass_name: RankActor
The actor is dead because all references to the actor were removed including lineage ref count.
The actor never ran - it was cancelled before it started running."""
    assert "cannot call this command back" in death_reason(report)


def test_a_lost_node_is_recognised() -> None:
    rays_words = NODE.rpartition("\n\t")[2]
    assert death_reason(NODE) == f"its node is gone: {rays_words}"
    assert death_reason(NODE.removesuffix(f"\n\t{rays_words}")) == "its node is gone"
    assert "(raylet)" in death_reason(RAYLET)


def test_rays_memory_monitor_says_how_full_the_node_was() -> None:
    why = death_reason(MONITOR)
    assert why == f"Ray's memory monitor killed it: {MONITOR.splitlines()[0]}"
    assert why.endswith(" 9.73GB used / 23.54GB limit (0.413540)")
    assert says_out_of_memory(why)


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: Free memory on device cuda:0 (0.27/79.15 GiB) on startup is less than desired "
        "GPU memory utilization (0.9, 71.23 GiB). Decrease GPU memory utilization or reduce GPU",
        "ValueError: No available memory for the cache blocks. Try increasing",
        "ValueError: To serve at least one request with the models's max seq len (4096), (1.00 GiB "
        "KV cache is needed, which is larger than the available KV cache memory (0.50 GiB).",
        "ValueError: Available memory on node 0 (11.28/17.96 GiB) on kv cache allocation is less "
        "than requested memory for kv (10000.0 GiB).",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ],
)
def test_messages_of_vllm_about_memory_are_recognised(text: str) -> None:
    assert says_out_of_memory(text)


def test_other_messages_are_not_about_memory() -> None:
    for text in (KILLED, ENDED, NODE, DEPENDENT, "RuntimeError: invalid device ordinal"):
        assert not says_out_of_memory(death_reason(text))


def test_an_error_belongs_to_the_process_that_it_came_from_first() -> None:
    assert failing_process(DEPENDENT) == (26191, "192.0.2.3")
    assert failing_process("KeyError: 'x'") is None


def test_the_root_cause_is_read_from_the_log_of_vllm(tmp_path: Path) -> None:
    log = str(tmp_path / "worker-1")
    assert logged_error(log) is None
    Path(f"{log}.out").write_text(FAILED_CORE)
    assert logged_error(log) == CAUSE


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = str(tmp_path / "worker-1")
    Path(f"{log}.out").write_text(FAILED_CORE + "sampling\n" * 100_000)
    assert logged_error(log) is None


def test_a_crash_of_the_interpreter_is_found(tmp_path: Path) -> None:
    log = str(tmp_path / "worker-1")
    assert last_crash_line(log) is None
    Path(f"{log}.err").write_bytes(
        b"\xff\nFatal Python error: old\nFatal Python error: Aborted\n  File x\n"
    )
    assert last_crash_line(log) == "Fatal Python error: Aborted"


def test_a_message_has_what_why_and_where() -> None:
    lines = message("rank 1 died", "killed", "/logs/worker-1").splitlines()
    assert lines == ["rank 1 died", "  Why: killed", "  Logs: /logs/worker-1.{out,err}"]
