"""What a page asks for and is answered; settings; and the page as a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from plimsoll.errors import ConfigError
from plimsoll.page.answers import answer, freeze_replies, settings
from plimsoll.page.serve import PLAN, RUNS, View, join_scripts, render_page
from plimsoll.page.watched import Watched, watch_runs
from plimsoll.run.directory import RunDirectory
from plimsoll.run.json_lines import append_row


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Watched, ...]:
    configs = {"a": "run: {steps: 3}\nkl: null\n", "b": "run: {steps: 4, seed: [1, 2]}\nkl: null\n"}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        run = RunDirectory(tmp_path / name)
        run.write_config(f"# ppo\n{config}")
        append_row(run.metrics_path, {"step": 1, "reward": 1.0, "eval/reward": None})
    return tuple(run.look() for run in watch_runs([tmp_path / name for name in configs]))


def test_settings_of_runs_are_compared_key_by_key(runs: tuple[Watched, ...]) -> None:
    assert settings(runs) == [
        {"key": "run.steps", "values": ["3", "4"], "differs": True},
        {"key": "kl", "values": ["null", "null"], "differs": False},
        {"key": "run.seed", "values": [None, "[1, 2]"], "differs": True},
    ]
    assert [row["differs"] for row in settings(runs[:1])] == [False, False]


@pytest.mark.parametrize(
    ("name", "query", "said"),
    [
        ("nothing", {}, "no 'nothing'. There are: progress"),
        ("curves", {}, "no section None"),
        ("curves", {"section": "learning", "from": "x"}, "from 'x' is no number"),
        ("memory", {"run": "2"}, "no run 2. There are 0 to 1"),
        ("seconds", {"run": "0.5"}, "no run 0.5"),
        ("seconds", {"run": "nan"}, "run 'nan' is no number"),
        ("curves", {"section": "learning", "to": "nan"}, "to 'nan' is no number"),
        ("groups", {"step": "inf"}, "step 'inf' is no whole number"),
        ("ends", {"step": "nan"}, "step 'nan' is no number"),
        ("group", {"step": "9", "group": "-inf"}, "group '-inf' is no whole number"),
        ("group", {"step": "9", "group": "0"}, "no trajectories of step 9"),
    ],
)
def test_what_there_is_none_of_is_refused(
    runs: tuple[Watched, ...], name: str, query: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        answer(runs, name, query)


def test_runs_that_differ_in_their_seed_are_a_group(tmp_path: Path) -> None:
    for name, steps, seed in (("a", 3, 1), ("b", 4, 1), ("c", 3, 2), ("d", 3, 3)):
        (tmp_path / name).mkdir()
        config = f"# ppo\nrun: {{directory: {name}, steps: {steps}, seed: {seed}}}\n"
        RunDirectory(tmp_path / name).write_config(config)
    for name in ("e", "f"):  # configs that cannot be read
        (tmp_path / name).mkdir()
        append_row(RunDirectory(tmp_path / name).metrics_path, {"step": 1})
    runs = [run.look() for run in watch_runs([tmp_path / name for name in "abcdef"])]
    assert answer(runs, "seeds", {}) == [0, 1, 0, 0, 4, 5]


def test_curves_have_the_hours_and_the_tokens_of_their_steps(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_config("# ppo\n")
    for step in (1, 2, 3):
        times = {"seconds/rollout": 1800.0, "seconds/sync": 1800.0}
        append_row(run.metrics_path, {"step": step, "reward": step / 4, "tokens": 50.0, **times})
    seen = [found.look() for found in watch_runs([tmp_path])]
    (table,) = answer(seen, "curves", {"section": "learning", "from": "2"})[0]["tables"]
    assert (table["x"], table["hours"], table["tokens"]) == ([2, 3], [2, 3], [100, 150])


def test_a_frozen_page_has_every_answer_as_json(runs: tuple[Watched, ...]) -> None:
    found = freeze_replies(runs[:1], ["a remark"])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["settings"] == answer(runs[:1], "settings", {})
    assert [one["step"] for one in found["progress"]] == [1]
    assert found["memory?run=0"]["remarks"] == ["a remark"]
    assert found["held-out?run=0"]["rows"][0]["cells"] == [["NaN", ""]]


def test_every_name_that_the_page_asks_for_is_answered(runs: tuple[Watched, ...]) -> None:
    asked = set(re.findall(r'load\("([a-z-]+)"', join_scripts(RUNS))) | {"held-out", "pictures"}
    known = {key.partition("?")[0] for key in freeze_replies(runs, [])}
    assert asked - known == {"ends", "group"}  # no trajectories here
    for name in asked - {"ends", "group", "curves"}:
        answer(runs, name, {"run": "0"})


@pytest.mark.parametrize("view", [RUNS, PLAN])
def test_modules_in_one_scope_have_no_name_twice_and_no_import_left(view: View) -> None:
    text = join_scripts(view)
    names = re.findall(r"^(?:async )?(?:function|const|let|class) (\w+)", text, re.M)
    assert len(names) > 30 and len(set(names)) == len(names)
    assert not re.search(r"^(import|export) ", text, re.M)


@pytest.mark.parametrize("view", [RUNS, PLAN])
def test_texts_never_become_markup(view: View) -> None:
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", join_scripts(view)
    )


def test_a_title_and_data_cannot_leave_their_places() -> None:
    attack = "</script><script>alert(1)</script>"
    text = render_page(attack, {"progress": [attack]}, RUNS)
    assert "<script>alert" not in text and "</script><script>alert" not in text
    (data,) = re.findall(r'id="data">(.*?)</script>', text)
    assert json.loads(data) == {"progress": [attack]}
