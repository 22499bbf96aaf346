"""The command as a user meets it: exit codes, streams, help, dry runs, and what is imported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import plimsoll
from plimsoll.cli import main
from plimsoll.config.base import Choice
from plimsoll.config.choice import check_choice
from plimsoll.jobs import JOBS

HEAVY = ("torch", "ray", "deepspeed", "vllm", "transformers", "datasets", "numpy", "pyarrow")
CONFIG = """\
run: {directory: out, steps: 3}
data: {train: {path: rows.jsonl, prompt: question, reference: answer}}
actor: {model: {path: model}}
critic: {model: {path: model}}
rewards: {answer: {name: math_answer}}
"""

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a good config, its rows and its model."""
    monkeypatch.chdir(tmp_path)
    Path("ppo.yaml").write_text(CONFIG)
    Path("rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps({"model_type": "qwen2"}))
    Path("model/tokenizer.json").write_text("{}")
    Path("model/chat_template.jinja").write_text("{{ messages }}")
    save_file({"w": np.zeros(1, dtype=np.float32)}, "model/model.safetensors")
    return tmp_path


def heavy_imports(*words: str) -> tuple[int, list[str]]:
    """The exit code and the heavy imports of a command line in a process of its own."""
    script = (
        "import sys, plimsoll.cli.command as cli\n"
        f"code = cli.main({list(words)!r})\n"
        f"print('HEAVY', *[name for name in {HEAVY!r} if name in sys.modules])\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "HEAVY" in done.stdout, done.stderr
    return done.returncode, done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], 0),
        (["--help"], 0),
        (["ppo", "--help"], 0),
        (["sft", "--help", "actor"], 0),
        (["ppo", "ppo.yaml", "--dry-run", "--run.stepz", "3"], 2),
        (["ppo", "ppo.yaml", "--dry-run", "--cluster.where", "local"], 4),
        (["ppo", "none.yaml"], 2),
        (["eval", "none"], 2),
        (["eval", "out"], 2),
        (["export", "model", "--to", "new"], 2),
        (["export", "out", "--to", "model"], 2),
        (["merge", "model", "--out", "new"], 2),
        (["merge", "out", "--out", "model"], 2),
    ],
)
def test_help_and_bad_configs_import_nothing_heavy(words: list[str], code: int) -> None:
    assert heavy_imports(*words) == (code, [])


def test_a_dry_run_imports_no_engine() -> None:
    code, imported = heavy_imports("ppo", "ppo.yaml", "--dry-run")
    assert code == 0
    assert not {"torch", "ray", "deepspeed", "vllm", "transformers", "datasets"} & set(imported)


def test_help_is_printed_without_arguments(capsys: Captured) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == said
    assert all(f"plimsoll {command}" in said for command in ("demo", "sft", "ppo", "doctor"))
    assert all(len(line) <= 80 for line in said.splitlines())


def test_every_job_has_a_command_a_loop_and_a_line_of_help(capsys: Captured) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    for name, job in JOBS.items():
        loop = import_module(job.loop)
        assert callable(loop.run) and callable(loop.measure)
        assert f"\n  plimsoll {name} CONFIG.yaml " in text


def test_version(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"plimsoll {plimsoll.__version__}\n"


def test_help_of_a_job_and_of_a_section(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["ppo", "--help"]) == 0
    whole = capsys.readouterr().out
    assert all(len(line) <= 80 for line in whole.splitlines())
    assert "Example: plimsoll ppo ppo.yaml" in whole and "--rollout.engines" in whole
    assert main(["ppo", "--help", "actor.zero"]) == 0
    part = capsys.readouterr().out
    assert part.startswith("actor.zero:") and "--rollout.engines" not in part


def test_help_of_a_preset_says_what_it_sets(capsys: Captured) -> None:
    assert main(["grpo", "--help"]) == 0
    whole = capsys.readouterr().out
    assert "`plimsoll rl`" in whole and "\n  batch.responses: 8\n" in whole
    assert main(["grpo", "--help", "algorithm.advantage"]) == 0
    part = capsys.readouterr().out
    assert part.startswith("`plimsoll grpo`")
    assert "  algorithm.advantage.name: grpo\n" in part and "batch.responses" not in part
    assert main(["grpo", "--help", "actor.zero"]) == 0
    assert capsys.readouterr().out.startswith("actor.zero:")
    assert main(["rl", "--help"]) == 0
    assert "\n  batch.responses: 8\n" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["pop"], ["'pop'", "'ppo'"]),
        (["--hepl"], ["'--hepl'", "'--help'"]),
        (["ppo"], ["No config file", "plimsoll ppo CONFIG.yaml"]),
        (["ppo", "a.yaml", "b.yaml"], ["'b.yaml'"]),
        (["ppo", "ppo.yaml", "--dryrun"], ["--dryrun", "--dry-run?"]),
        (["ppo", "ppo.yaml", "--rewards", "1"], ["'--rewards'", "`plimsoll ppo --help`"]),
        (["ppo", "ppo.yaml", "--learning-rate", "1"], ["--actor.optimizer.learning_rate"]),
        (["ppo", "pop.yaml"], ["pop.yaml", "Nearest: ppo.yaml"]),
        (["ppo", "ppo.yaml", "--actor.zero.stagee", "3"], ["actor.zero.stagee: 3", "zero.stage?"]),
        (["ppo", "ppo.yaml", "--data.train.path", "rows.jsnl"], ["rows.jsnl", "rows.jsonl?"]),
        (
            ["ppo", "ppo.yaml", "--rollout.vllm.memory_share", "1.5"],
            ["rollout.vllm.memory_share: 1.5"],
        ),
        (["ppo", "ppo.yaml", "--rollout.engines=0"], ["rollout.engines: 0"]),
        (["ppo", "ppo.yaml", "--algorithm.mini_batches=5"], ["must divide", "32 * 1"]),
        (["ppo", "--help", "actr"], ["'actr'", "Nearest: actor"]),
        (["demo", "--sed", "1"], ["--sed"]),
        (["doctr"], ["'doctor'"]),
        (["doctor", "--adress", "a:1"], ["--adress", "plimsoll doctor --help"]),
        (["demo", "--seed", "x"], ["--seed", "'x'"]),
    ],
)
def test_wrong_usage_is_one_block_on_stderr(
    words: list[str], parts: list[str], capsys: Captured
) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and "Traceback" not in said.err
    assert all(part in said.err for part in parts), said.err
    assert not Path("out").exists()


LONG = "x" * 300


@pytest.mark.parametrize(
    "command",
    [
        "init grpo --model Qwen/Qwen2.5-0.5B --data LONG",
        *("report LONG", "watch LONG", "eval LONG"),
        *("rollouts LONG", "export LONG --to out", "merge LONG --out out", "calibrate LONG"),
        *("doctor --directory LONG", "demo --directory LONG"),
    ],
)
def test_every_command_reports_a_path_that_is_too_long(command: str, capsys: Captured) -> None:
    assert main(command.replace("LONG", LONG).split()) == 2
    told = r"error: \S*x{300}\S*: File name too long\..*\n"
    assert re.fullmatch(told, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("typed", "command"),
    [("RLOO", "rloo"), ("reinforce++", "reinforce_pp"), ("dr-grpo", "dr_grpo")],
)
def test_a_preset_in_another_spelling_gets_the_right_command(
    typed: str, command: str, capsys: Captured
) -> None:
    assert main([typed, "ppo.yaml"]) == 2
    assert f"`plimsoll {command} CONFIG.yaml`" in capsys.readouterr().err
    assert command in JOBS


@pytest.mark.parametrize(
    ("package", "name"),
    [
        *(("advantage", name) for name in ("reinforce", "remax", "gdpo", "batch_mean")),
        *(("policy_loss", name) for name in ("sapo", "dppo_tv")),
    ],
)
def test_a_part_of_a_method_typed_as_a_command_gets_the_flag_of_rl(
    package: str, name: str, capsys: Captured
) -> None:
    """The flag that the message names exists."""
    assert main([name, "ppo.yaml"]) == 2
    said = capsys.readouterr().err
    assert f"`plimsoll rl CONFIG.yaml --algorithm.{package}.name {name}`" in said
    check_choice(Choice(name=name), f"plimsoll.algorithm.{package}")


def test_a_preset_without_values_refuses_a_critic(capsys: Captured) -> None:
    assert main(["grpo", "ppo.yaml"]) == 4
    said = capsys.readouterr().err
    assert "[critic-unused]" in said and "grpo takes no values" in said


@pytest.mark.parametrize("name", ["orpo", "simpo", "ipo", "cpo"])
def test_a_loss_typed_as_a_command_gets_the_flag_of_dpo(name: str, capsys: Captured) -> None:
    """The job takes the flag that the message names."""
    assert main([name, "dpo.yaml"]) == 2
    said = capsys.readouterr().err
    assert f"`plimsoll dpo CONFIG.yaml --algorithm.loss.name {name}`" in said
    check_choice(Choice(name=name), "plimsoll.algorithm.preference_loss")


def test_a_config_of_another_job_names_that_command(capsys: Captured) -> None:
    Path("other.yaml").write_text(f"# ppo: sums\n{CONFIG}")
    assert main(["dpo", "other.yaml"]) == 2
    assert capsys.readouterr().err.rstrip().endswith("another job: `plimsoll ppo other.yaml`?")
    assert main(["dpo", "ppo.yaml"]) == 2  # whose first line names none
    assert "another job" not in capsys.readouterr().err


def test_a_conflict_has_its_own_exit_code(capsys: Captured) -> None:
    assert main(["ppo", "ppo.yaml", "--cluster.where=local"]) == 4
    assert "rollout.vllm" in capsys.readouterr().err


def test_debug_shows_the_traceback(capsys: Captured) -> None:
    assert main(["ppo", "ppo.yaml", "--rollout.engines=0", "--debug"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and "\nerror: 1 problem" in said


def test_a_dry_run_prints_config_and_placement_and_starts_nothing(capsys: Captured) -> None:
    before = sorted(Path().rglob("*"))
    words = ["ppo", "--run.steps", "7", "ppo.yaml", "--dry-run", "--cluster.ranks=2"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "  steps: 7\n" in said and "\nProcesses\n" in said and "ranks 0-1" in said
    assert "nothing was started" in said
    assert sorted(Path().rglob("*")) == before


def test_what_a_dry_run_prints_is_a_config(capsys: Captured) -> None:
    assert main(["ppo", "ppo.yaml", "--dry-run"]) == 0
    dumped = capsys.readouterr().out.split("\nProcesses\n")[0]
    Path("again.yaml").write_text(dumped)
    assert main(["ppo", "again.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().out.split("\nProcesses\n")[0] == dumped


def test_the_module_runs_as_the_command() -> None:
    words = [sys.executable, "-m", "plimsoll", "--version"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"plimsoll {plimsoll.__version__}\n")


def test_an_unexpected_error_is_one_block_too() -> None:
    script = (
        "import sys, plimsoll.cli.command as cli\n"
        "sys.argv = ['plimsoll', '--version', *sys.argv[1:]]\n"
        "cli.__version__ = type('Broken', (), {'__format__': lambda *_: 1 / 0})()\n"
        "sys.exit(cli.main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: unexpected ZeroDivisionError: ")
    assert "--debug" in done.stderr and "Traceback" not in done.stderr
    debug = subprocess.run(
        [sys.executable, "-c", script, "--debug"], capture_output=True, text=True
    )
    assert debug.returncode == 1 and "Traceback" in debug.stderr


@pytest.mark.parametrize(
    "words", [["--help"], ["ppo", "--help"], ["ppo", "ppo.yaml", "--dry-run"], ["demo", "--help"]]
)
def test_a_command_that_only_prints_ends_silently_when_its_reader_is_gone(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "plimsoll", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_standard_output_is_reported() -> None:
    command = [sys.executable, "-m", "plimsoll", "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    told = r"error: Standard output .*: No space left on device\.\n"
    assert done.returncode == 1 and re.fullmatch(told, done.stderr)


def test_no_file_takes_the_descriptor_of_a_closed_stream(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom plimsoll.cli import main\n"
        "sys.argv = ['plimsoll', '--version']\n"
        f"sys.exit(main() or open({str(tmp_path / 'opened')!r}, 'w').fileno() < 3)"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, script]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_debug_shows_what_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def hangs(words: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("plimsoll.cli.command._TOOLS", {"plan": hangs})
    assert main(["plan", "--debug"]) == 130
    told = capsys.readouterr().err
    assert "in hangs" in told and told.endswith("\ninterrupted\n")


def test_sigterm_ends_a_command_in_order() -> None:
    os.mkfifo("waits.yaml")
    command = [sys.executable, "-m", "plimsoll", "plan", "waits.yaml"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with open("waits.yaml", "w"):  # once it is read
        process.terminate()
        _, told = process.communicate()
    assert (process.returncode, told) == (130, "interrupted\n")


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0"}


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ("ppo.yaml", [r"ppo.yaml holds '\xfc', which ascii lacks", "with PYTHONUTF8=1"]),
        ("rün.yaml", [r"r\udcc3\udcbcn.yaml' cannot be written in utf-8", "with PYTHONUTF8=1"]),
    ],
)
def test_names_that_the_locale_cannot_encode_are_refused(config: str, parts: list[str]) -> None:
    Path("ppo.yaml").write_text(CONFIG + "# ü\n", encoding="utf-8")
    command = [sys.executable, "-m", "plimsoll", "ppo", config]
    done = subprocess.run(command, capture_output=True, env=os.environ | ASCII)
    said = done.stderr.decode()
    assert done.returncode == 2 and said.startswith("error: ") and "Traceback" not in said
    assert all(part in said for part in parts), said


def test_text_that_the_locale_cannot_encode_is_escaped() -> None:
    script = (
        "import sys, plimsoll.cli.command as cli\n"
        "sys.argv = ['plimsoll', '--version']\n"
        "cli.__version__ = '\\xfc'\n"
        "sys.exit(cli.main())"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, env=os.environ | ASCII)
    assert (done.returncode, done.stdout) == (0, b"plimsoll \\xfc\n")
