"""Leaks are told from noise, warming up and single jumps."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.run.ledger import LeakWatch, LedgerRow, growth
from plimsoll.run.readings import Footprint, Line

MB = 10**6
GB = 10**9

levels = st.floats(0.2 * GB, 200 * GB)
lengths = st.integers(30, 100)
seeds = st.integers(0, 2**32 - 1)


def noise(seed: int, length: int, size: float) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, size, length)


@given(levels, lengths, seeds, st.floats(0, 0.05))
def test_noise_is_no_leak(level: float, length: int, seed: int, share: float) -> None:
    held = level + noise(seed, length, share * level)
    assert growth(held.tolist()) is None


@given(levels, st.integers(60, 100), seeds, st.floats(0.05, 10), st.floats(0.05, 0.6))
def test_growth_that_comes_to_rest_is_no_leak(
    level: float, length: int, seed: int, amplitude: float, rest: float
) -> None:
    """Exponentially, within a share `rest` of the window."""
    steps = np.arange(length)
    warming = amplitude * level * (1 - np.exp(-steps / (rest * length)))
    assert growth((level + warming + noise(seed, length, 1e-4 * level)).tolist()) is None


@given(levels, lengths, seeds, st.floats(0, 1), st.floats(0, 0.4), st.floats(0.01, 3))
def test_one_climb_is_no_leak(
    level: float, length: int, seed: int, place: float, width: float, size: float
) -> None:
    """At once, or over some of the window's steps: what an evaluation with longer rows takes."""
    begun = (np.arange(length) - place * length) / max(1.0, width * length)
    climb = size * level * np.clip(begun, 0, 1)
    assert growth((level + climb + noise(seed, length, 1e-4 * level)).tolist()) is None


@given(st.floats(0.5 * GB, 200 * GB), lengths, seeds, st.floats(0.02, 2), st.floats(0, 0.02))
def test_steady_growth_is_a_leak_at_its_true_rate(
    level: float, length: int, seed: int, risen: float, share: float
) -> None:
    """Growing in all by `risen` of the level, with noise of a share of that."""
    rate = risen * level / length
    held = level + rate * np.arange(length) + noise(seed, length, share * risen * level)
    assert growth(held.tolist()) == pytest.approx(rate, rel=0.1)


@given(levels, lengths)
def test_a_process_that_shrinks_has_no_leak(level: float, length: int) -> None:
    assert growth((level - 1e-3 * level * np.arange(length)).tolist()) is None


def row(step: int, phase: str, process: str, host: int, allocated: int | None = None) -> LedgerRow:
    device = None if allocated is None else allocated + GB
    held = Footprint(host, allocated, allocated, device)
    line = Line(8 * GB, 10 * GB)
    return LedgerRow(step, phase, process, "node 0", None, held, held, line, 1.0)


def with_node(rows: list[LedgerRow]) -> list[LedgerRow]:
    """The rows of one process, and those of a node which has 1 GB left."""
    line = Line(99 * GB, 100 * GB)
    return rows + [replace(one, process="node 0", line=line) for one in rows]


def step_rows(step: int, process: str, *, card: int = 0, host: int = 0) -> list[LedgerRow]:
    """In `score` the process takes what it never gives back; `rollout` takes and `sync` gives."""
    on_card = GB + step * card if process.startswith("rank") else None
    before = None if on_card is None else on_card - card
    on_host = GB + step * host
    return with_node(
        [
            row(step, "rollout", process, on_host - host + 300 * MB, before),
            row(step, "score", process, on_host + 300 * MB, on_card),
            row(step, "sync", process, on_host, on_card),
        ]
    )


def test_the_recipe_is_named_with_its_phase_rate_and_steps_left_once() -> None:
    watch = LeakWatch()
    told = {s: watch.add(step_rows(s, "controller", host=10 * MB)) for s in range(1, 101)}
    found = [(step, leak) for step, leaks in told.items() for leak in leaks]
    assert [step for step, _ in found] == [40]
    leak = found[0][1]
    assert (leak.process, leak.where, leak.steps_left) == ("controller", "host", 100)
    assert leak.rate == pytest.approx(10 * MB)
    assert leak.phase == "score"
    assert re.search("controller .*10 MB .*host.*score.*100 steps", leak.text)


@pytest.mark.parametrize(("where", "left"), [("device", 200), ("host", 100)])
def test_a_rank_with_a_card_leaks_on_either_and_has_a_line_for_each(where: str, left: int) -> None:
    watch = LeakWatch()
    added = {"card" if where == "device" else "host": 10 * MB}
    leaks = [leak for s in range(60) for leak in watch.add(step_rows(s, "rank 1", **added))]
    assert [(leak.where, leak.phase, leak.steps_left) for leak in leaks] == [(where, "score", left)]


def test_a_rank_on_cpu_may_warm_up_for_a_hundred_steps() -> None:
    watch = LeakWatch()
    for step in range(1, 101):
        assert watch.add(with_node([row(step, "train_actor", "rank 0", GB + step * 8 * MB)])) == []
    for step in range(101, 400):
        assert watch.add(with_node([row(step, "train_actor", "rank 0", GB + 100 * 8 * MB)])) == []


def test_a_rank_on_cpu_that_goes_on_growing_is_named() -> None:
    watch = LeakWatch()
    told = [
        s
        for s in range(1, 300)
        if watch.add(with_node([row(s, "train_actor", "rank 0", GB + s * 8 * MB)]))
    ]
    assert told == [160]


def test_a_resumed_run_starts_anew() -> None:
    """Its processes are new, and grow while they warm up."""
    watch = LeakWatch()
    for step in range(1, 36):
        assert watch.add(with_node([row(step, "score", "controller", GB + step * 10 * MB)])) == []
    again = [row(36, "load", "controller", GB), row(36, "score", "controller", GB + 360 * MB)]
    assert watch.add(with_node(again)) == []
    for step in range(37, 60):
        assert watch.add(with_node([row(step, "score", "controller", GB + step * 10 * MB)])) == []


def test_checkpoints_and_nodes_are_left_out() -> None:
    watch = LeakWatch()
    for step in range(1, 200):
        assert watch.add(with_node([row(step, "save", "controller", GB + step * 10 * MB)])) == []
        assert watch.add([row(step, "score", "node 0", GB + step * 10 * MB)]) == []
