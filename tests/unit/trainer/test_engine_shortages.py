"""Errors of memory, as torch and Python raise them, and others that are left alone."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
import torch

from plimsoll.errors import FunctionFailed
from plimsoll.machine.incident import Incident, OutOfMemory
from plimsoll.trainer.memory import explain_shortage

CPU = torch.device("cpu")


def caught(error: Exception) -> Incident:
    with pytest.raises(OutOfMemory) as raised, explain_shortage(CPU, lambda: "critic"):
        raise error
    assert raised.value.__cause__ is error
    return raised.value.incident


def test_torch_says_how_much_was_asked_for() -> None:
    incident = caught(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU"))
    assert (incident.where, incident.role) == ("host", "critic")  # of a process on CPU
    assert incident.asked == 3 * 2**29
    assert incident.held is not None and incident.held.host > 50 * 2**20
    assert incident.held.device is None


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'"),
        RuntimeError("could not create a primitive"),  # as seen under `ulimit -v`
    ],
)
def test_what_others_than_torchs_allocator_cannot_have(error: RuntimeError) -> None:
    assert caught(error).asked is None


def test_a_function_of_ones_own_runs_out_of_memory_like_any_other() -> None:
    failed = FunctionFailed("algorithm.loss: 'mine:greedy' raised MemoryError")
    with pytest.raises(FunctionFailed), explain_shortage(CPU, lambda: "actor"):
        raise failed from KeyError("beta")
    with pytest.raises(OutOfMemory) as raised, explain_shortage(CPU, lambda: "actor"):
        raise failed from MemoryError()
    assert raised.value.incident.role == "actor"


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="this process has a context on a card")
def test_the_process_in_front_of_an_engine_tells_of_the_card_and_does_not_touch_it() -> None:
    """What vLLM says where it cannot wake: cumem_allocator.cpp, in the engine's own process."""
    error = RuntimeError("Call to wake_up method failed: CUDA Error: out of memory at cumem.cpp:62")
    with (
        pytest.raises(OutOfMemory) as raised,
        explain_shortage(torch.device("cuda"), lambda: "rollout"),
    ):
        raise error
    incident = raised.value.incident
    assert (incident.where, incident.role, incident.held) == ("device", "rollout", None)
    assert not torch.cuda.is_initialized()


def test_python_says_nothing() -> None:
    incident = caught(MemoryError())
    assert (incident.why, incident.asked) == ("MemoryError: ", None)


def test_what_the_system_really_does_not_give() -> None:
    """torch's allocator asks malloc, which refuses what no address space could hold."""
    with pytest.raises(OutOfMemory) as raised, explain_shortage(CPU, lambda: None):
        torch.empty(2**46, dtype=torch.uint8)
    assert raised.value.incident.asked == 2**46
    assert "DefaultCPUAllocator" in raised.value.incident.why


def test_other_errors_pass() -> None:
    for error in (
        RuntimeError("Expected all tensors on one device"),
        RuntimeError("could not create a primitive descriptor for a matmul primitive"),
        ValueError("memory"),
    ):
        with pytest.raises(type(error)) as raised, explain_shortage(CPU, lambda: None):
            raise error
        assert raised.value is error


def test_a_process_under_a_limit_of_address_space_tells_it() -> None:
    """malloc fails for real, in a process that can still say so."""
    script = (
        "import resource, torch\n"
        "from plimsoll.trainer.memory import explain_shortage\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "most = pages * resource.getpagesize() + 2**26\n"
        "resource.setrlimit(resource.RLIMIT_AS, (most, most))\n"
        "with explain_shortage(torch.device('cpu'), lambda: 'actor'):\n"
        "    torch.empty(2**28, dtype=torch.uint8)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    last = done.stderr.splitlines()[-1]
    assert last.startswith("plimsoll.machine.incident.OutOfMemory: RuntimeError:")
    assert "you tried to allocate 268435456 bytes" in last
