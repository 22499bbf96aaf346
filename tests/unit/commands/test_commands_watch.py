"""`plimsoll watch`: what its server answers, and to whom."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plimsoll.cli import main
from plimsoll.commands.report import Reader, answer_with, find_runs
from plimsoll.machine.guard import Guard
from plimsoll.page.serve import RUNS, make_app, render_page
from plimsoll.page.watched import watch_runs
from plimsoll.run.directory import RunDirectory
from plimsoll.run.json_lines import append_row

testclient = pytest.importorskip("starlette.testclient", reason="the extra `serve` is not there")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path)
    found.write_config("# ppo\nrun: {steps: 3}\n")
    append_row(found.metrics_path, {"step": 1, "reward": 0.5})
    return found


def test_what_is_no_number_in_json_is_null(run: RunDirectory) -> None:
    app = make_app("", lambda name, query: {"reward": [float("nan"), 1.0]}, Guard("word", "::1"))
    client = testclient.TestClient(app, "http://127.0.0.1:8765")
    assert client.get("/word/data/groups").json() == {"reward": [None, 1.0]}


def test_nested_rows_do_not_end_the_reader(tmp_path: Path) -> None:
    """They are read in a process of their own, as Arrow's reader can end a whole process."""
    deep = ("[" * 90_000 + "]" * 90_000, '{"x": ' * 90_000 + "1" + "}" * 90_000)
    rows = [
        *(f'{{"step": 2, "x": {value}}}' for value in deep),
        '{"step": [2], "eval/reward": {"a": "b"}}',
        '{"step": 2, "eval/reward": {"a": "b"}, "reward": [[1]], "seconds": "x"}',
    ]
    files = ("metrics.jsonl", "ledger.jsonl", "end.json", "now.json")
    for number, (name, row) in enumerate(itertools.product(files, rows)):
        run = RunDirectory(tmp_path / f"{number:02}-{name}")
        run.path.mkdir()
        run.write_config("# ppo\nrun: {steps: 3}\n")
        append_row(run.metrics_path, {"step": 1, "reward": 0.5})
        with (run.path / name).open("a") as file:
            file.write(row + "\n")
    script = (
        "import sys; from pathlib import Path\n"
        "from plimsoll.commands.report import answer_with\n"
        "from plimsoll.page.watched import watch_runs\n"
        "for path in sorted(Path(sys.argv[1]).iterdir()):\n"
        "    print(path.name, flush=True)\n"
        "    runs = [one.look() for one in watch_runs([path])]\n"
        "    for name in ('progress', 'settings', 'held-out', 'seconds', 'memory'):\n"
        "        answer_with(lambda: runs)(name, {})\n"
        "    answer_with(lambda: runs)('curves', {'section': 'learning'})\n"
        "print('read')\n"
    )
    words = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["read"], done.stdout + done.stderr


def test_only_who_knows_the_token_is_answered(run: RunDirectory) -> None:
    runs = [one.look() for one in watch_runs([run.path])]
    guard = Guard("word", "127.0.0.1")
    app = make_app(render_page("a", None, RUNS), answer_with(lambda: runs), guard)
    client = testclient.TestClient(app, "http://127.0.0.1:8765")
    shown = client.get("/word/")
    assert shown.status_code == 200 and "connect-src &#39;self&#39;" in shown.text
    assert shown.headers["cache-control"] == "no-store"
    assert client.get("/word/data/progress").json()[0]["step"] == 1
    curves = client.get("/word/data/curves", params={"section": "learning"}).json()
    assert curves[0]["tables"][0]["y"] == [[0.5], [None]]
    refused = client.get("/word/data/group", params={"step": "1", "group": "0"})
    assert refused.status_code == 404 and "no trajectories of step 1" in refused.json()["detail"]
    for path in ("/", "/other/", "/other/data/progress", "/wörd/", "/word/data/../../", "/docs"):
        assert client.get(path).status_code == 404, path


def test_rows_are_read_while_a_run_writes_them(run: RunDirectory) -> None:
    with Reader(watch_runs([run.path])) as reader:
        for step in (2, 3):
            append_row(run.metrics_path, {"step": step, "reward": 0.5})
            deadline = time.monotonic() + 60
            while reader.runs[0].metrics.last.get("step") != step:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    assert not reader._thread.is_alive()


def test_a_directory_stands_for_the_runs_below_it(tmp_path: Path) -> None:
    for name in ("a", "b/c", "b/d"):
        (tmp_path / name).mkdir(parents=True)
        RunDirectory(tmp_path / name).write_config("# ppo\n")
    (tmp_path / "none").mkdir()
    assert find_runs(tmp_path) == [tmp_path / name for name in ("a", "b/c", "b/d")]
    assert find_runs(tmp_path / "b" / "c") == [tmp_path / "b" / "c"]


def test_a_directory_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "ppo").mkdir(parents=True)
    (tmp_path / "runs" / "ppo" / "config.yaml").touch()
    assert main(["watch", str(tmp_path / "rnus")]) == 2
    assert f"{tmp_path / 'rnus'} " in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["watch", str(tmp_path / "empty")]) == 2
    assert f"{tmp_path / 'empty'} holds no run" in capsys.readouterr().err
    assert main(["watch"]) == 2
    assert "required: RUN" in capsys.readouterr().err


def test_an_address_that_cannot_be_had_is_refused(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(run.path), "--host", "192.0.2.1", "--port", "9"]) == 2
    assert " 192.0.2.1:9: " in capsys.readouterr().err
