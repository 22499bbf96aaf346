"""What is taken for a hang, and what is not: by clocks that tests set."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.cluster.heartbeats import (
    Hang,
    Heartbeats,
    Pulse,
    _state,
    allowance,
    read_pulse,
    takes_whole_model,
)

ALLOWED = 60.0
EVERY = 5.0
BUSY, IDLE, ON_DISK, STOPPED = "busy", "idle", "on disk", "stopped"


def pulse(state: str, seconds: float) -> Pulse:
    """What a process answers that has been in a state for so long. One that only waits uses 1 % of
    a core all the same."""
    return Pulse(seconds * (1.0 if state == BUSY else 0.01), state == ON_DISK)


def watch(
    states: Mapping[str, str], seconds: float, heartbeats: Heartbeats | None = None
) -> Hang | None:
    """Watch processes in these states, one round after the other; the first hang that is seen."""
    heartbeats = heartbeats or Heartbeats()
    until = heartbeats.now + seconds
    while heartbeats.now < until:
        heartbeats = heartbeats.later(EVERY, 2 * EVERY)
        for name in heartbeats.asked:
            if states[name] != STOPPED:
                heartbeats = heartbeats.answer(name, pulse(states[name], heartbeats.now))
        if hang := heartbeats.hang(ALLOWED):
            return hang
        for name in states:
            heartbeats = heartbeats.ask(name)
    return None


def test_the_one_that_does_not_answer_is_named_though_all_stand_still() -> None:
    """The others wait for it, inside a collective."""
    hang = watch({"rank 0": IDLE, "rank 1": STOPPED, "engine 0": IDLE}, 1000)
    assert hang is not None and hang.silent == ("rank 1",)
    assert ALLOWED < hang.seconds <= ALLOWED + EVERY and hang.allowed == ALLOWED


def test_where_all_answer_and_nobody_works_nobody_is_named() -> None:
    hang = watch({"rank 0": IDLE, "rank 1": IDLE}, 1000)
    assert hang is not None and hang.silent == () and hang.seconds > ALLOWED


@pytest.mark.parametrize("state", [BUSY, ON_DISK])
def test_as_long_as_one_works_others_may_wait(state: str) -> None:
    """A long evaluation, a compiler, a save to a slow disk."""
    assert watch({"rank 0": IDLE, "rank 1": state}, 100_000) is None


def test_one_that_does_not_answer_yet_may_work() -> None:
    """An engine in a long step: that nobody works is not said of it."""
    heartbeats = (
        Heartbeats()
        .later(EVERY, EVERY)
        .ask("engine 0")
        .ask("rank 0")
        .answer("rank 0", Pulse(0, False))
    )
    for _ in range(11):
        heartbeats = heartbeats.later(EVERY, EVERY).ask("rank 0").answer("rank 0", Pulse(0, False))
    assert heartbeats.now - heartbeats.moved == 60.0 and heartbeats.hang(ALLOWED - 1) is None
    late = heartbeats.answer("engine 0", Pulse(0, False))
    assert late.longest == 55.0 and late.hang(ALLOWED - 1) == Hang((), 60.0, ALLOWED - 1)
    assert late.move().hang(ALLOWED - 1) is None


def test_a_call_that_ends_is_a_sign_of_life() -> None:
    heartbeats = Heartbeats().later(50, 50).move().later(50, 50)
    assert heartbeats.hang(ALLOWED) is None and heartbeats.longest == 50
    assert heartbeats.later(11, 50).hang(ALLOWED) == Hang((), 61, ALLOWED)


def test_who_is_silent_stays_so_over_many_short_calls() -> None:
    """A stopped engine that nobody calls while ranks train."""
    heartbeats = Heartbeats().later(EVERY, EVERY).ask("engine 0")
    for _ in range(13):
        heartbeats = heartbeats.begin().later(EVERY, EVERY).move().ask("engine 0")
    assert heartbeats.hang(ALLOWED) == Hang(("engine 0",), 65, ALLOWED)
    assert heartbeats.longest == EVERY


def test_time_in_which_nobody_watched_does_not_count() -> None:
    """Ctrl-Z and an hour later `fg`, a laptop that slept: those who were asked answer then."""
    heartbeats = Heartbeats().later(EVERY, 2 * EVERY).ask("rank 0").later(3600, 2 * EVERY)
    assert heartbeats.hang(ALLOWED) is None
    assert heartbeats.now == 3 * EVERY


def watch_spinning(ends: Callable[[float], int]) -> Hang | None:
    """Watch two ranks on cards, whose hosts spin, by how many micro-batches have ended by when."""
    heartbeats = Heartbeats()
    for _ in range(100):
        heartbeats = heartbeats.later(EVERY, 2 * EVERY)
        for name in heartbeats.asked:
            pulse = Pulse(0.0, False, ends(heartbeats.now))
            heartbeats = heartbeats.answer(name, pulse)
        if hang := heartbeats.hang(ALLOWED):
            return hang
        for name in ("rank 0", "rank 1"):
            heartbeats = heartbeats.ask(name)
    return None


def test_ranks_that_spin_work_as_long_as_micro_batches_end() -> None:
    assert watch_spinning(lambda now: int(now / (0.9 * ALLOWED))) is None
    hang = watch_spinning(lambda now: int(min(now, 100) / 10))  # then each waits for the other
    assert hang is not None and hang.silent == () and ALLOWED < hang.seconds <= ALLOWED + 2 * EVERY


def test_a_host_that_spins_has_a_pulse_without_cpu_time() -> None:
    """CUDA's wait takes a whole core; loading and saving are judged by the CPU all the same."""
    spinning = read_pulse(7, spins=True)
    assert (spinning.cpu_seconds, spinning.ends) == (0.0, 7) and read_pulse().cpu_seconds > 0
    assert takes_whole_model("load_model") and not takes_whole_model("train")


@given(
    states=st.dictionaries(
        st.sampled_from("abcdef"), st.sampled_from([BUSY, IDLE, ON_DISK, STOPPED]), min_size=1
    )
)
def test_all_that_are_stopped_are_named_and_nobody_else(states: dict[str, str]) -> None:
    hang = watch(states, 1000)
    stopped = {name for name, state in states.items() if state == STOPPED}
    if stopped:
        assert hang is not None and set(hang.silent) == stopped
    elif {BUSY, ON_DISK} & set(states.values()):
        assert hang is None
    else:
        assert hang is not None and hang.silent == ()


@pytest.mark.parametrize(
    ("hang_timeout", "call", "longest", "allowed"),
    [
        (None, "train", None, 600),  # kernels are compiled
        (None, "train", 1.0, 60),
        (None, "train", 100.0, 500),
        (None, "load_model", 1.0, 600),
        (None, "save_checkpoint", 200.0, 1000),
        (30.0, "load_model", None, 30),
        (30.0, "train", 100.0, 30),
        (0.0, "train", 1.0, inf),
    ],
)
def test_how_long_a_silence_may_be(
    hang_timeout: float | None, call: str, longest: float | None, allowed: float
) -> None:
    assert allowance(hang_timeout, call, longest) == allowed


def test_a_pulse_counts_the_work_of_processes_below() -> None:
    """A compiler is such a process; its work counts also after it has ended."""
    before = read_pulse()
    subprocess.run([sys.executable, "-c", "sum(range(20_000_000))"], check=True)
    own = time.process_time()
    after = read_pulse()
    assert after.cpu_seconds - before.cpu_seconds > 0.1 > time.process_time() - own


def test_the_state_of_a_thread_is_found_behind_any_name(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("12 (a) S (b) D 1 2 3")
    assert _state(tmp_path / "stat") == "D"
