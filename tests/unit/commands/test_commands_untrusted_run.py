"""Run directories of others: what their configs name does not run, and their links lead nowhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plimsoll.cli import main
from plimsoll.commands.demo import make_tokenizer
from plimsoll.commands.found_models import refuse_code
from plimsoll.commands.report import answer_with
from plimsoll.config.files import load_named, loading_only
from plimsoll.config.flags import apply_flags, parse_flags
from plimsoll.config.yaml_tree import read_tree
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.page.watched import watch_runs
from plimsoll.records import Prompt, RewardPart, single_turn
from plimsoll.run.directory import RunDirectory, refuse_strange_files
from plimsoll.run.trajectories import write_trajectories

CONFIG = """\
# grpo
run: {{directory: there, steps: 1}}
actor: {{model: {{path: {home}/model, trust_remote_code: {trusts}}}}}
data: {{train: {{path: rows.jsonl, prompt: prompt, reference: answer}}}}
rewards: {{right: {{name: exact_match}}}}
algorithm: {{policy_loss: {{name: {loss}}}}}
"""
TOKENIZER = '{"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [null, "mine.Mine"]}}'


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose loss, and whose model's own tokenizer, leave a mark where they run."""
    mark = f"open({str(tmp_path / 'mark')!r}, 'a').close()\n"
    (tmp_path / "evil.py").write_text(f"{mark}def loss(a, b): return a\n")
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    run = RunDirectory(tmp_path / "there")
    prompt, zeros = Prompt(0, np.array([1], np.int32), "1+1=", "2"), np.zeros(1, np.float32)
    answer = single_turn(prompt, 0, np.array([2]), zeros, "2", "stop", 0, (RewardPart("right", 1),))
    write_trajectories(run.trajectories_path(1), 1, [answer])
    write(run, trusts="false", loss=tmp_path / "evil.py:loss")
    return run


def write(run: RunDirectory, **values: object) -> None:
    run.config_path.write_text(CONFIG.format(home=run.path.parent, **values))


def test_functions_of_a_run_are_not_imported_unless_it_is_trusted(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / "checkpoints" / "step-000001").mkdir(parents=True)
    for words in (["eval", str(run.path)], ["export", str(run.path), "--to", str(tmp_path / "x")]):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert f"policy_loss.name: {tmp_path}/evil.py:loss" in told and "--trust-run" in told
        assert not (tmp_path / "mark").exists()
    assert main(["eval", str(run.path), "--trust-run"])  # not this function, and no model either
    assert "--trust-run" not in capsys.readouterr().err and (tmp_path / "mark").exists()


def test_a_mask_reads_a_tokenizer_that_holds_code_only_of_a_trusted_run(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["rollouts", str(run.path), "--mask"]
    assert main(words) == 0  # the loss is not needed for it
    write(run, trusts="true", loss="clip")
    (tmp_path / "model" / "tokenizer_config.json").write_text(TOKENIZER)
    (tmp_path / "model" / "mine.py").write_text((tmp_path / "evil.py").read_text())
    capsys.readouterr()
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "actor.model.trust_remote_code: true" in told and "--trust-run" in told
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["my evil.py:loss", "evil.py:lo ss", "evil.py: loss"])
def test_names_with_spaces_run_nothing_either(
    name: str, run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my evil.py").write_text((tmp_path / "evil.py").read_text())
    write(run, trusts="false", loss=f"{str(tmp_path / name)!r}")
    assert main(["eval", str(run.path)]) == 2
    assert "--trust-run" in capsys.readouterr().err and not (tmp_path / "mark").exists()


def test_code_that_no_form_tells_is_refused_as_it_is_loaded(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag may name code; what the run itself names stays forbidden beside it."""
    monkeypatch.chdir(tmp_path)
    with loading_only({"evil.py:loss"}):
        load_named("evil.py:loss")
        for name in ("evil: loss", "antigravity:0x"):
            with pytest.raises(ConfigError, match="untrusted"):
                load_named(name)


@pytest.mark.parametrize(
    "named",
    [
        "rewards: {a: {name: 'antigravity:0x'}}",
        "preset: there/evil.yaml",
        "rewards: {a: {name: my.module:score}}",
        "rewards: {a: {name: code, options: {sandbox: none}}}",
        "rewards: {a: {name: reasoning_gym}}",
        "rewards: {a: {judge: {url: http://x, api_key: AWS_SECRET_ACCESS_KEY}}}",
        "environment: {name: agent.py}",
        "environment: {name: command, options: {command: touch mark}}",
        "environment: {name: functions, tools: [ok, 'a.py:tool']}",
        "algorithm: {policy_loss: {name: 'loss.py:loss'}}",
        "reward: {model: {trust_remote_code: true}}",
        "cluster: {address: evil.example:6379}",
        "rollout: {vllm: {arguments: {tool_parser_plugin: /tmp/evil.py}}}",
        "rollout: {vllm: {arguments: {speculative_config: {model: my.package.Model}}}}",
    ],
)
def test_what_a_run_may_not_name_unless_it_is_trusted(named: str) -> None:
    tree = read_tree(named, "config.yaml")
    with pytest.raises(ConfigError, match="--trust-run"):
        refuse_code("config.yaml", tree)


def test_plain_values_and_what_flags_say_are_no_code_of_the_run() -> None:
    plain = """
preset: grpo
run: {directory: runs/one, mirror: 's3://bucket/one'}
cluster: {address: null}
actor: {model: {path: org/name, trust_remote_code: false}}
data: {date: '2026-11-29T09:07:58', system: 'Say: yes', chat_template: "{{ messages }}: x"}
rewards: {a: {name: code}, b: {http: {urls: ['http://127.0.0.1:80/x']}}}
rollout: {vllm: {arguments: {kv_cache_dtype: fp8, enforce_eager: true}}}
"""
    refuse_code("config.yaml", read_tree(plain, "config.yaml"))
    flags = parse_flags(["--rewards.a.name=mine.py:f", "--actor.model.trust_remote_code=true"])
    refuse_code("config.yaml", apply_flags(read_tree(plain, "config.yaml"), flags))


@pytest.mark.parametrize(
    "name",
    [
        *("config.yaml", "run.log", "trajectories/step-000002.parquet"),
        "trajectories/001000/step-001002.parquet",
    ],
)
def test_a_link_out_of_a_run_is_refused(
    run: RunDirectory, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "private").write_text("run: mine\n")
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).parent.mkdir(exist_ok=True)
    (run.path / name).symlink_to(os.path.relpath(tmp_path / "private", (run.path / name).parent))
    for command in ("report", "rollouts", "watch"):
        assert main([command, str(run.path)]) == 2
        assert f"{name} is a link to {tmp_path}/private" in capsys.readouterr().err
    assert not run.report_path.exists()


def test_links_within_a_run_and_to_its_checkpoints_are_followed(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run.path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    (run.path / "trajectories" / "step-000002.parquet").symlink_to("step-000001.parquet")
    (tmp_path / "link").symlink_to(run.path)
    assert main(["rollouts", str(tmp_path / "link")]) == 0
    assert "1+1=" in capsys.readouterr().out


def test_a_link_that_appears_while_a_run_is_watched_is_not_followed(
    run: RunDirectory, tmp_path: Path
) -> None:
    (tmp_path / "private").write_text("mine\n")
    run.log_path.write_text("its own\n")
    watched = watch_runs([run.path])[0].look()
    answered = answer_with(lambda: [watched])
    assert "its own" in str(answered("console", {"run": "0"}))
    run.log_path.unlink()
    run.log_path.symlink_to(tmp_path / "private")
    with pytest.raises(PlimsollError, match="is a link to"):
        answered("console", {"run": "0"})
    assert "is a link to" in watched.look().problem


def test_folders_are_listed_again_only_where_they_have_changed(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that has just changed is listed each time: its clock may stand still meanwhile."""
    listed: list[str] = []
    scandir = os.scandir

    def noted(path: Path) -> Any:
        listed.append(Path(path).name)
        return scandir(path)

    later = run.trajectories_path(1234)
    later.parent.mkdir()
    later.write_bytes(run.trajectories_path(1).read_bytes())
    monkeypatch.setattr("plimsoll.run.directory.os.scandir", noted)
    refuse_strange_files(run.path)
    refuse_strange_files(run.path)
    assert listed.count("001000") == 2
    monkeypatch.setattr("plimsoll.run.directory._SETTLED_NS", -(10**12))
    for _ in range(3):
        refuse_strange_files(run.path)
    assert listed.count("001000") == 3
    (tmp_path / "private").write_text("mine\n")
    later.with_name("step-001235.parquet").symlink_to(tmp_path / "private")
    with pytest.raises(ConfigError, match="step-001235"):
        refuse_strange_files(run.path)


def test_a_pipe_in_a_run_is_refused(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(run.end_path)
    assert main(["report", str(run.path)]) == 2
    assert "end.json is neither a file" in capsys.readouterr().err


def test_a_small_file_of_very_many_bytes_is_refused(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """One text, stored once, stands in every row."""
    path = run.trajectories_path(1)
    table = pq.read_table(path)
    column = table.schema.get_field_index("response")
    table = table.set_column(column, "response", pa.array(["x" * 2**20]))
    pq.write_table(pa.concat_tables([table] * 300), path, compression="zstd")
    assert path.stat().st_size < 2**20
    assert main(["rollouts", str(run.path)]) != 0
    assert "its rows take more than" in capsys.readouterr().err
