"""Which curves are drawn, of which points."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plimsoll.page.curves import SECTIONS, curves, extremes
from plimsoll.page.watched import Watched, watch_runs
from plimsoll.run.directory import RunDirectory
from plimsoll.run.json_lines import JsonRow, write_rows
from plimsoll.run.ledger import LedgerRow, write_ledger
from plimsoll.run.readings import Footprint, Line

ALL = (-inf, inf)


def run_of(path: Path, rows: list[JsonRow], config: str = "# ppo\nrun: {steps: 9}\n") -> Watched:
    path.mkdir(exist_ok=True)
    run = RunDirectory(path)
    run.write_config(config)
    write_rows(run.metrics_path, rows)
    (found,) = watch_runs([path])
    return found.look()


def panel(runs: list[Watched], section: Any, title: str, **more: Any) -> dict[str, Any]:
    found = {one["title"]: one for one in curves(runs, section, more.pop("steps", ALL), **more)}
    one: dict[str, Any] = found[title]
    return one


@pytest.mark.parametrize(
    ("values", "buckets", "kept"),
    [
        ([3.0, 1.0, 2.0, 5.0], 2, [0, 1, 2, 3]),
        # the ends; 5 and 0 of the first six, 9 and 6 of the last
        ([1.0, 5, 2, 3, 4, 0, 7, 7, 9, 8, 6, 7], 2, [0, 1, 5, 8, 10, 11]),
        ([np.nan, 1.0, np.nan, 3.0], 1, [1, 3]),
        ([np.nan], 4, []),
    ],
)
def test_the_extremes_of_each_bucket_are_kept(
    values: list[float], buckets: int, kept: list[int]
) -> None:
    assert extremes(np.array(values), buckets).tolist() == kept


def test_a_long_curve_keeps_its_only_peak_and_comes_down_to_few_points(tmp_path: Path) -> None:
    rows: list[JsonRow] = [
        {"step": s, "reward": 9.0 if s == 31_415 else 0.5} for s in range(1, 50_001)
    ]
    (table,) = panel([run_of(tmp_path, rows)], "learning", "Reward")["tables"]
    assert len(table["x"]) <= 2 * 400 + 2
    assert table["y"][0][table["x"].index(31_415)] == 9
    assert (table["x"][0], table["x"][-1]) == (1, 50_000)


def test_a_part_of_a_run_is_asked_for_by_its_steps(tmp_path: Path) -> None:
    rows: list[JsonRow] = [{"step": step, "reward": float(step)} for step in range(1, 1001)]
    run = run_of(tmp_path, rows)
    (table,) = panel([run], "learning", "Reward", steps=(10.5, 14.0))["tables"]
    assert (table["x"], table["y"]) == ([11, 12, 13, 14], [[11, 12, 13, 14], [None] * 4])


def test_an_interval_goes_with_its_metric(tmp_path: Path) -> None:
    bounds = {"eval/reward_low": 0.25, "eval/reward_high": 0.75}
    rows: list[JsonRow] = [{"step": 1, "reward": 1.0}, {"step": 2, "eval/reward": 0.5, **bounds}]
    (table,) = panel([run_of(tmp_path, rows)], "learning", "Reward")["tables"]
    assert table["y"] == [[1, None], [None, 0.5]]
    assert (table["low"], table["high"]) == ([None, [None, 0.25]], [None, [None, 0.75]])


def test_health_has_its_ranges_as_they_are_at_the_last_step(tmp_path: Path) -> None:
    rows: list[JsonRow] = [{"step": 1, "kl": 1.0, "entropy": 2.0, "response_tokens": 500.0}]
    run = run_of(tmp_path, rows)
    assert panel([run], "health", "entropy")["band"] == (0.01, 4.0)
    kl = panel([run], "learning", "KL from the reference")
    assert kl["band"] == (-1.0, 50.0)  # 0.1 nats a token
    assert panel([run], "learning", "Length of responses")["band"] == (1.5, None)
    assert [one["title"] for one in curves([run], "health", ALL)] == ["entropy"]


def test_every_metric_is_in_one_section_and_loading_in_none(tmp_path: Path) -> None:
    row = {"step": 1, "reward": 1.0, "eval/x": 1.0, "eval/x_low": 0.0, "eval/x_high": 2.0}
    row |= {"entropy": 1.0, "odd": 1.0, "odd_low": 1.0, "seconds/load": 9.0, "seconds/sync": 1.0}
    run = run_of(tmp_path, [row | {"memory_bytes/local": 1.0, "tokens_per_second": 3.0}])
    found = {
        section: [s["name"] for p in curves([run], section, ALL) for s in p["series"]]
        for section in SECTIONS
    }
    assert found == {
        "learning": ["reward", "eval/reward", "eval/x"],
        "health": ["entropy"],
        "time": ["seconds/sync", "tokens_per_second"],
        "memory": [],
        "other": ["odd", "odd_low"],
    }


def test_phases_are_means_of_steps_without_the_evaluation_before_them(tmp_path: Path) -> None:
    seconds = [(9.0, 9.0), (1.0, None), (3.0, 2.0), (5.0, 4.0)]
    rows: list[JsonRow] = [
        {"step": step, "seconds/rollout": a, **({} if b is None else {"seconds/sync": b})}
        for step, (a, b) in enumerate(seconds)
    ]
    run = run_of(tmp_path, rows)
    shown = panel([run], "time", "Time of a step by phase", buckets=2)
    assert shown["stacked"]
    (table,) = shown["tables"]
    assert table.pop("hours") == pytest.approx([19 / 3600, 33 / 3600], rel=1e-5)
    assert table == {"run": 0, "x": [1, 3], "y": [[2, 5], [1, 4]], "together": 2}


def test_runs_are_overlaid_but_for_what_is_stacked(tmp_path: Path) -> None:
    rows: list[JsonRow] = [{"step": 1, "reward": 1.0, "seconds/rollout": 2.0}]
    two = [run_of(tmp_path / "a", rows), run_of(tmp_path / "b", [{**rows[0], "kl": 0.5}])]
    assert [one["run"] for one in panel(two, "learning", "Reward")["tables"]] == [0, 1]
    assert [one["run"] for one in panel(two, "learning", "KL from the reference")["tables"]] == [1]
    two[1] = run_of(tmp_path / "b", [{"step": 1, "eval/reward": 0.5, "seconds/sync": 2.0}])
    shown = panel(two, "learning", "Reward")  # each has a column for every series
    assert [one["y"] for one in shown["tables"]] == [[[1], [None]], [[None], [0.5]]]
    stacked = [one["title"] for one in curves(two, "time", ALL)]
    assert stacked == ["Time of a step by phase: a", "Time of a step by phase: b"]


def test_memory_has_the_peak_of_each_kind_of_process(tmp_path: Path) -> None:
    """Earlier versions wrote a metric for each process."""
    peaks = [{"rank 0": 2e9, "rank 1": 3e9, "node": 5e9}, {"rank": 4e9}]
    rows = [{f"memory_bytes/{name}": size for name, size in each.items()} for each in peaks]
    run = run_of(tmp_path, [{"step": 1 + n, **row} for n, row in enumerate(rows)])
    held = Footprint(10**9)
    ledger = [
        LedgerRow(1, "score", process, "node 0", None, held, held, Line(1, 9), 1.0)
        for process in ("rank 0", "rank 1", "node 0")
    ]
    write_ledger(run.run.ledger_path, ledger)
    run = run.look()
    shown = panel([run], "memory", "Memory at its fullest")
    assert [one["name"] for one in shown["series"]] == ["rank", "node"]
    assert (shown["tables"][0]["x"], shown["tables"][0]["y"]) == ([1, 2], [[3, 4], [5, None]])


def test_the_only_reward_of_a_run_is_drawn_beside_those_of_another(tmp_path: Path) -> None:
    alone = run_of(tmp_path / "a", [{"step": 1, "reward": 1.0, "reward/right": 1.0}])
    parts = {"reward/right": 0.5, "eval/right": 0.25, "reward/form": 2.0}
    both = run_of(tmp_path / "b", [{"step": 1, "reward": 1.5, **parts}])
    other = run_of(tmp_path / "c", [{"step": 1, "reward": 3.0, "reward/brief": 3.0}])
    titles = [one["title"] for one in curves([alone], "learning", ALL)]
    assert titles == ["Reward"]  # the part says nothing beside the whole
    right = panel([alone, both, other], "learning", "Reward: right")
    assert [(one["run"], one["y"]) for one in right["tables"]] == [
        (0, [[1], [None]]),
        (1, [[0.5], [0.25]]),
    ]
    brief = panel([alone, other], "learning", "Reward: brief")
    assert [one["run"] for one in brief["tables"]] == [1]


def test_the_use_of_cards_is_drawn_where_it_is_known(tmp_path: Path) -> None:
    rows: list[JsonRow] = [{"step": 1, "mfu": 0.25, "gpu_busy": 0.5}]
    use = panel([run_of(tmp_path, rows)], "time", "Use of the cards")
    assert use["tables"][0]["y"] == [[0.25], [0.5]]
