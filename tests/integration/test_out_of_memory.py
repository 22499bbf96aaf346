"""Memory that runs out, in each way in which it does: the command goes on with smaller
micro-batches, or ends with who and where, how much, the four answers and the smallest change.
"""

from __future__ import annotations

import copy
import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import PPO, Outcome, run, write_config, write_task
from safetensors.torch import load_file
from torch import Tensor

GROUP = "PLIMSOLL_TEST_GROUP"
"""The environment variable with the cgroup that a rank moves to before it eats."""

LOSSES = f"""
import os
import resource

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.algorithm.policy_loss import clip as plain


class FullCard(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of "
                "79.11 GiB of which 278.00 MiB is free."
            )
        return function(*arguments, **(keywords or {{}}))


def full_card(inputs):
    FullCard().__enter__()  # what the next micro-batch allocates fails
    return plain(inputs)


FAILED = []


def once(inputs):
    if not FAILED and dist.get_rank() == dist.get_world_size() - 1:
        FAILED.append(True)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
    return plain(inputs)


def limited(inputs):
    if dist.get_rank() == 1:
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + 2**26, size + 2**26))
        torch.empty(3 * 2**28)
    return plain(inputs)


def greedy(inputs):
    if dist.get_rank() == 1:
        with open(os.environ["{GROUP}"] + "/cgroup.procs", "w") as members:
            members.write(str(os.getpid()))
        torch.ones(2**28)
    return plain(inputs)
"""


def config(loss: str, **cluster: Any) -> dict[str, Any]:
    found = copy.deepcopy(PPO)
    found["run"] = {"directory": "run", "steps": 2}
    found["cluster"] |= {"memory_halvings": 0} | cluster
    found["algorithm"]["policy_loss"] = {"name": f"hungry:{loss}"}
    del found["data"]["eval"]
    return found


def start(home: Path, settings: dict[str, Any], *flags: str, vocabulary: int = 1024) -> Outcome:
    write_task(home, vocabulary=vocabulary)
    (home / "hungry.py").write_text(LOSSES)
    write_config(home, "ppo", settings)
    return run(home, "ppo", "ppo.yaml", *flags)


def answers(text: str) -> list[str]:
    """The words that answer the four questions."""
    questions = (
        r"1\. Is the node's free memory below the plan's\? (\w+):\n",
        r"2\. Did the partitioning take effect\? (\w+):\n",
        r"3\. Did two models land on one node\? (\w+):\n",
        r"4\. Do other processes hold much\? (\w+):\n",
    )
    found = re.search(r"(?:   .+\n)+".join(questions), text)
    assert found, text
    return list(found.groups())


def fields(told: str) -> dict[str, str]:
    """Return what the first lines of the message say, by the word that begins each."""
    words = "error|Why|Settings|Logs|Where|Asked|Measured|Predicted"
    return dict(re.findall(rf"^ *({words})\b[^:\n]*: (.+)$", told, re.MULTILINE))


_WHO = re.compile(r"(.+) \(pid \d+(?: on node \S+)?\) .* host memory")
_WHERE = re.compile(r"host memory of (.+), node \S+; phase (\w+), role (\w+)")


def place(told: str) -> tuple[str, ...]:
    """Return who ran out by the first line, and by the place: process, phase and role."""
    found = fields(told)
    who, where = _WHO.fullmatch(found["error"]), _WHERE.fullmatch(found["Where"])
    assert who and where, told
    return *who.groups(), *where.groups()


def check_written(home: Path, outcome: Outcome) -> None:
    assert outcome.code == 1
    told, _, last = outcome.err.removeprefix("error: ").rpartition("This is in ")
    assert re.findall(r"run/\S+\w", last) == ["run/out-of-memory.txt", "run/run.log"]
    assert (home / "run" / "out-of-memory.txt").read_text() == told
    assert all(len(line) <= 80 for line in told[told.index("Where: ") :].splitlines())


def weights(home: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(home / "run" / "model" / "model.safetensors")
    return found


@pytest.mark.parametrize(
    "cluster",
    [
        {},
        pytest.param(
            {"where": "ray", "ranks": 2}, marks=[pytest.mark.engine, pytest.mark.slow]
        ),  # test_engine_shortage.py has ranks without Ray
    ],
)
def test_training_goes_on_with_smaller_micro_batches(
    tmp_path: Path, cluster: dict[str, Any]
) -> None:
    outcomes = {}
    for name in ("once", "plain"):
        settings = config(name, memory_halvings=1, **cluster)
        settings["actor"]["model"]["dtype"] = settings["critic"]["model"]["dtype"] = "float32"
        (tmp_path / name).mkdir()
        outcomes[name] = start(tmp_path / name, settings)
        assert outcomes[name].code == 0, outcomes[name].err
    home, said = tmp_path / "once", " ".join(outcomes["once"].out.split())
    found = re.search(r"ran out of host memory at a pack of (\d+) tokens\.", said)
    assert found and f"actor have at most {int(found[1]) // 2} tokens" in said, said
    written = (home / "run" / "shortage.txt").read_text()
    assert "phase train_actor, role actor" in written and len(answers(written)) == 4
    rows = [json.loads(row) for row in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["actor/micro_batch_tokens"] for row in rows] == [int(found[1]) // 2] * 2
    ours, theirs = weights(home), weights(tmp_path / "plain")
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-4


def test_an_allocation_that_fails_in_the_only_process(tmp_path: Path) -> None:
    settings = config("full_card")
    settings["batch"] = {"prompts": 16, "responses": 16, "micro_batch_tokens": 4000}
    settings["algorithm"] |= {"mini_batches": 1, "epochs": 1}
    settings["actor"]["model"]["head_chunk"] = 4096
    outcome = start(tmp_path, settings, vocabulary=30_000)
    check_written(tmp_path, outcome)
    # On a busy machine the heap has not given back yet what sampling 256 sequences took: 700 MB.
    found = fields(outcome.err)
    assert re.search(r"OutOfMemoryError: .* 2\.50 GiB", found["Why"])
    assert place(outcome.err) == ("this process", "local", "train_actor", "actor")
    assert found["Asked"].startswith("2.68 GB ")
    assert all(re.match(r"[\d.]+ [MG]B host$", found[name]) for name in ("Measured", "Predicted"))
    items = re.findall(r"^  +\d+ MB  (.+)$", outcome.err, re.MULTILINE)
    assert [name for name in items if name != "process torch's CUDA build"][:2] == [
        "process interpreter and libraries",
        "actor logits chunk",
    ]
    # One rank divides nothing; all models are in it, and the sampler.
    assert answers(outcome.err)[:3] == ["no", "no", "yes"]
    assert "actor at stage" in outcome.err and "on 1 rank" in outcome.err
    assert "\n   + batch.micro_batch_tokens: 2000\n" in outcome.err
    assert "ulimit -v" in " ".join(outcome.err.split())  # it should have fitted


@pytest.mark.slow
@pytest.mark.engine
def test_a_rank_whose_system_gives_no_more(tmp_path: Path) -> None:
    settings = config("limited", where="ray", ranks=2)
    settings["actor"] |= {"zero": {"stage": 3}}
    settings["critic"] |= {"zero": {"stage": 2}}
    outcome = start(tmp_path, settings)
    check_written(tmp_path, outcome)
    found = fields(outcome.err)
    assert re.search(r"RuntimeError: .*DefaultCPUAllocator: .* 3221225472 bytes", found["Why"])
    assert place(outcome.err) == ("training rank 1", "rank 1", "train_actor", "actor")
    assert found["Logs"] and found["Asked"].startswith("3.22 GB ")
    assert re.match(r"\d+ MB host$", found["Measured"])
    assert answers(outcome.err)[:3] == ["no", "yes", "yes"]
    text = " ".join(outcome.err.split())
    assert "of the actor's weights" in text and "of the critic's fp32 masters" in text


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup of 64 MiB of memory, of version 1 or 2."""
    root = Path("/sys/fs/cgroup")
    first = root / "memory" if (root / "memory").is_dir() else root
    folder = first / f"plimsoll-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        limits = [folder / name for name in ("memory.limit_in_bytes", "memory.max")]
        limit = next((file for file in limits if file.exists()), None)
        if limit is None:
            pytest.skip(f"{first} does not limit memory")
        limit.write_text(str(2**26))
        yield folder
    finally:
        folder.rmdir()


@pytest.mark.slow  # for it can run beside no other
@pytest.mark.alone
@pytest.mark.engine
def test_a_rank_that_the_kernel_kills(
    tmp_path: Path, group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GROUP, str(group))
    outcome = start(tmp_path, config("greedy", where="ray", ranks=2))
    check_written(tmp_path, outcome)
    found = fields(outcome.err)
    assert "the kernel has killed a process" in found["Why"] and found["Logs"]
    assert re.search(r"^Measured .*last read: ", outcome.err, re.MULTILINE)
    assert place(outcome.err) == ("training rank 1", "rank 1", "train_actor", "actor")
    assert re.match(r"\d+ MB host$", found["Measured"])
    assert re.match(r"[\d.]+ [MG]B host$", found["Predicted"])
    assert answers(outcome.err)[:3] == ["no", "yes", "yes"]


@pytest.mark.engine
@pytest.mark.slow
def test_a_cache_of_vllm_that_is_too_large(tmp_path: Path) -> None:
    settings = config("plain", where="ray")
    settings["algorithm"]["policy_loss"] = {"name": "clip"}
    settings["rollout"] |= {"vllm": {"cpu_kv_cache_gib": 10_000.0}, "transformers": None}
    outcome = start(tmp_path, settings, "--force")
    check_written(tmp_path, outcome)
    found = fields(outcome.err)
    assert found["Why"].startswith("vLLM ") and "kv (10000.0 GiB)" in found["Why"]
    assert found["Settings"].startswith("rollout.vllm.cpu_kv_cache_gib: 10000.0, ")
    assert place(outcome.err) == ("rollout engine 0", "engine 0", "load", "rollout")
    assert found["Logs"]
    assert re.search(r"\n  10737 GB  rollout KV cache\n", outcome.err), outcome.err
    assert answers(outcome.err)[0] == "yes"
    before, after = (f"   {sign} rollout.vllm.cpu_kv_cache_gib: " for sign in "-+")
    assert f"{before}10000.0\n{after}" in outcome.err
