"""Settings of PyTorch's allocator: what a user's environment says, and what a rank sets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch

from plimsoll.machine.local_host import (
    VARIABLES,
    expands,
    named_settings,
    user_settings,
    with_segments,
)

FIRST, SECOND = VARIABLES
READ = "print(torch._C._accelerator_getAllocatorSettings())"


def run(script: str, **environment: str) -> str:
    """Return what a process prints that begins with these allocator variables, and no others."""
    others = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    words = [sys.executable, "-c", f"import torch\n{script}"]
    done = subprocess.run(
        words, capture_output=True, text=True, check=True, env=others | environment
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {SECOND: "max_split_size_mb:64"},
        {FIRST: "max_split_size_mb:32", SECOND: "max_split_size_mb:64"},
    ],
)
def test_a_users_settings_are_those_that_pytorch_reads(environment: Mapping[str, str]) -> None:
    assert user_settings(environment) == run(READ, **environment)


def test_an_empty_variable_says_nothing() -> None:
    assert user_settings({FIRST: "", SECOND: "max_split_size_mb:64"}) == "max_split_size_mb:64"
    assert user_settings({FIRST: ""}) == named_settings({FIRST: ""}) == ""


def test_settings_are_named_by_their_variable() -> None:
    assert named_settings({SECOND: "max_split_size_mb:64"}) == f"{SECOND}=max_split_size_mb:64"


@pytest.mark.parametrize(
    ("settings", "grow"),
    [
        ("", False),
        ("max_split_size_mb:64", False),
        ("expandable_segments:False", False),
        ("max_split_size_mb:64, expandable_segments: True", True),
    ],
)
def test_it_is_known_whether_segments_grow(settings: str, grow: bool) -> None:
    assert expands(settings) is grow


@pytest.mark.parametrize(
    ("settings", "expandable", "changed"),
    [
        ("", True, "expandable_segments:True"),
        ("expandable_segments:True", False, "expandable_segments:False"),
        (
            "expandable_segments:False, roundup_power2_divisions:[256:1,>:2]",
            True,
            "roundup_power2_divisions:[256:1,>:2],expandable_segments:True",
        ),
    ],
)
def test_other_settings_stay(settings: str, expandable: bool, changed: str) -> None:
    assert with_segments(settings, expandable) == changed


def test_pytorch_takes_what_is_changed_and_what_stays() -> None:
    switch = "from plimsoll.trainer.process_group import expand_segments\nexpand_segments(False)\n"
    found = run(switch + READ, **{FIRST: "max_split_size_mb:64,expandable_segments:True"})
    assert found == "max_split_size_mb:64,expandable_segments:False"


def test_an_older_torch_is_asked_by_its_own_name() -> None:
    older = """
change = torch._C._accelerator_setAllocatorSettings
del torch._C._accelerator_setAllocatorSettings
torch.cuda.memory._set_allocator_settings = change
from plimsoll.trainer.process_group import expand_segments
expand_segments(True)
"""
    assert run(older + READ) == "expandable_segments:True"


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
)
@pytest.mark.parametrize(
    ("own", "kinds"), [({}, "[True, False]"), ({FIRST: "max_split_size_mb:64"}, "[False, False]")]
)
def test_a_ranks_segments_grow_until_that_is_switched_off(
    own: Mapping[str, str], kinds: str
) -> None:
    """If the user has settings, they never grow."""
    script = """
from plimsoll.trainer.process_group import Place, join
from plimsoll.machine.host import free_port
from plimsoll.trainer.process_group import expand_segments
def grow():
    before = {segment["address"] for segment in torch.cuda.memory_snapshot()}
    kept.append(torch.empty(2**28, device="cuda"))
    new = [s for s in torch.cuda.memory_snapshot() if s["address"] not in before]
    return all(segment["is_expandable"] for segment in new)
kept = []
join(Place(0, 1, "127.0.0.1", free_port(), "cuda", 1))
first = grow()
expand_segments(False)
print([first, grow()])
"""
    assert run(script, **own).splitlines()[-1] == kinds
