"""Figures for Prometheus: its format, names and labels, and who gets them."""

from __future__ import annotations

import re
import stat
from collections import Counter
from pathlib import Path

import pytest

from plimsoll.errors import ConfigError
from plimsoll.machine.guard import Guard
from plimsoll.page.progress import prometheus_text
from plimsoll.page.serve import CONTENT_TYPE, make_app, read_token
from plimsoll.page.watched import Watched, watch_runs
from plimsoll.run.directory import RunDirectory
from plimsoll.run.json_lines import append_row

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_]\w*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
SAMPLE = re.compile(rf"({NAME})\{{({LABEL}(?:,{LABEL})*)\}} (NaN|[-+]?[0-9.]+(?:e[-+]?[0-9]+)?)")
COMMENT = re.compile(rf"# (?:HELP {NAME} (?:[^\\\n]|\\\\|\\n)*|TYPE {NAME} gauge)")
"""https://prometheus.io/docs/instrumenting/exposition_formats/"""


def write_run(path: Path, **metrics: float | None) -> Path:
    path.mkdir(parents=True)
    run = RunDirectory(path)
    run.write_config("# ppo\nrun: {steps: 3}\n")
    append_row(run.metrics_path, {"step": 2, **metrics})
    return path


def watched(*paths: Path) -> list[Watched]:
    return [run.look() for run in watch_runs(paths)]


def samples(text: str) -> dict[tuple[str, str], str]:
    """Return the value of each sample by its name and labels; check every line."""
    lines = text.splitlines()
    assert text.endswith("\n")
    assert all((COMMENT if line[0] == "#" else SAMPLE).fullmatch(line) for line in lines), text
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert set(Counter(types).values()) == {1}
    found: dict[tuple[str, str], str] = {}
    for match in map(SAMPLE.fullmatch, lines):
        if match is not None:
            assert match[1] in types and (match[1], match[2]) not in found
            found[match[1], match[2]] = match[3]
    return found


def test_the_last_metrics_of_each_run_have_its_name_and_job(tmp_path: Path) -> None:
    runs = watched(
        write_run(tmp_path / "a", **{"actor/loss": -0.25, "seconds/rollout": 1.5, "kl": None}),
        write_run(tmp_path / "b", **{"actor/loss": 1e-9, "memory_bytes/rank 0": 64.0}),
    )
    found = samples(prometheus_text(runs))
    a, b = 'run="a",job="ppo"', 'run="b",job="ppo"'
    assert found["plimsoll_actor_loss", a] == "-0.25"
    assert found["plimsoll_actor_loss", b] == "1e-09"
    assert found["plimsoll_seconds", f'{a},phase="rollout"'] == "1.5"
    assert found["plimsoll_memory_bytes", f'{b},process="rank 0"'] == "64.0"
    assert found["plimsoll_kl", a] == "NaN"
    assert found["plimsoll_step", a] == "2.0" and found["plimsoll_steps", a] == "3.0"
    states = {labels: value for (name, labels), value in found.items() if name == "plimsoll_state"}
    assert [labels for labels in states if states[labels] == "1.0"] == [
        f'{run},state="stopped"' for run in (a, b)
    ]


def test_names_that_become_the_same_keep_their_own_samples(tmp_path: Path) -> None:
    (run,) = watched(write_run(tmp_path / "a", **{"reward/x-y": 1.0, "reward/x.y": 2.0}))
    found = samples(prometheus_text([run]))
    labels = 'run="a",job="ppo",metric="reward/x{}y"'
    assert found["plimsoll_reward_x_y", labels.format("-")] == "1.0"
    assert found["plimsoll_reward_x_y", labels.format(".")] == "2.0"


def test_labels_are_escaped(tmp_path: Path) -> None:
    path = write_run(tmp_path / 'a "b" \\ c\nd', **{"memory_bytes/é": 1.0, 'odd\n"\\': 2.0})
    found = samples(prometheus_text(watched(path)))
    labels = 'run="a \\"b\\" \\\\ c\\nd",job="ppo"'
    assert found["plimsoll_memory_bytes", f'{labels},process="é"'] == "1.0"
    assert found["plimsoll_odd___", labels] == "2.0"


def test_only_who_has_the_token_gets_figures(tmp_path: Path) -> None:
    client_module = pytest.importorskip("starlette.testclient", reason="without the extra `serve`")
    runs = watched(write_run(tmp_path / "a", reward=0.5))
    guard = Guard("word", "127.0.0.1")
    app = make_app("", lambda name, query: None, guard, lambda: prometheus_text(runs))
    client = client_module.TestClient(app, "http://127.0.0.1:8765")
    reply = client.get("/metrics", headers={"Authorization": "Bearer word"})
    assert reply.status_code == 200 and reply.headers["content-type"] == CONTENT_TYPE
    assert samples(reply.text)["plimsoll_reward", 'run="a",job="ppo"'] == "0.5"
    strange = {"Authorization": "Bearer word", "Host": "evil.example"}
    for given in ({}, {"Authorization": "Bearer other"}, {"Authorization": "word"}, strange):
        assert client.get("/metrics", headers=given).status_code == 404
    assert "printed its whole address" in client.get("/").text
    app = make_app("", lambda name, query: None, guard)
    without = client_module.TestClient(app, "http://127.0.0.1:8765")
    assert without.get("/metrics", headers={"Authorization": "Bearer word"}).status_code == 404


def test_a_token_is_written_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = read_token(path)
    assert read_token(path) == token and len(token) >= 16
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"mode 644.*chmod 600"):
        read_token(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="holds no token"):
        read_token(path)
    with pytest.raises(ConfigError, match="cannot be used"):
        read_token(tmp_path / "nowhere" / "token")
