"""The plan of a distillation: the teacher, what it leaves, and both chunks of logits; by hand."""

from __future__ import annotations

from typing import Any

from rule_cases import config as read
from rule_cases import conflicts

from plimsoll.jobs.which import spec_of
from plimsoll.machine.hardware import parse_cluster
from plimsoll.memory.contents.contents import contents_of, make_job
from plimsoll.memory.contents.overheads import Constants
from plimsoll.timeline.items import Allocation, Moment

STUDENT, TEACHER = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B"
LEARNING = Moment("train_actor", "forward_backward")
SCORING = Moment("score", "forward")


def changes(**more: Any) -> dict[str, Any]:
    return {
        "actor.model": {"path": STUDENT, "head_chunk": 256},
        "actor.zero.stage": 2,
        "batch": {"sequences": 16, "micro_batch_tokens": 2048},
        "cluster": {"ranks": 8},
        "teacher.model.path": TEACHER,
        **more,
    }


def found(role: str, name: str, **more: Any) -> list[Allocation]:
    """Return the items of rank 3, which collects nothing."""
    hardware = parse_cluster("8xA100-80GB", 1, 10**12)
    job = make_job(spec_of(read("distill", changes(**more))), hardware, Constants())
    [rank] = [process for process in job.layout.processes if process.name == "rank 3"]
    held = contents_of(job, rank)
    return [one for one in held if (one.item.role, one.item.name) == (role, name)]


def test_states_wait_in_host_memory_and_logits_come_in_two_chunks() -> None:
    # 16 sequences of 512 tokens over 8 ranks: 1,024 tokens a rank, 3,584 wide, in a pinned block
    [states] = found("teacher", "hidden states")
    assert 2**22 < 2 * 1024 * 3584 < 2**23
    assert (states.item.bytes, states.item.where) == (2**23, "host")
    shared = {"cluster": {"ranks": 8, "sequence_parallel": 2}}  # 2,048 of a stream, shared by two
    [states] = found("teacher", "hidden states", **shared)
    assert states.item.bytes == 2**23
    more = {"batch": {"sequences": 40, "micro_batch_tokens": 1024}}
    [states] = found("teacher", "hidden states", **more)  # 2,560 tokens in three micro-batches
    assert states.item.bytes == 3 * 2**23
    assert {SCORING, LEARNING} <= states.moments
    inputs, chunks = (
        [one for one in found("actor", name) if LEARNING in one.moments]
        for name in ("teacher's head inputs", "logits chunks")
    )
    assert [one.item.bytes for one in inputs] == [2 * 1024 * 3584]
    block = 2**24 // 151936
    assert [one.item.bytes for one in chunks] == [(2 * 2 * 256 + 8 * 4 * block) * 151936]
    assert found("actor", "logits chunk") == []


def test_a_divided_teacher_has_its_head_gathered_and_runs_no_logits() -> None:
    assert found("teacher", "gathered head") == []
    assert found("teacher", "logits chunk") == []
    for more in ({"teacher.zero.stage": 3}, {"teacher.zero.offload": "cpu"}):
        [head] = found("teacher", "gathered head", **more)
        assert head.item.bytes == 2 * 152064 * 3584
        assert LEARNING in head.moments and head.item.where == "device"


def test_a_teacher_with_fewer_tokens_is_refused() -> None:
    assert "vocabulary" not in conflicts("distill", changes())
    smaller = changes(**{"teacher.model.path": "meta-llama/Llama-2-7b-hf"})
    assert conflicts("distill", smaller)["vocabulary"].is_conflict
