"""Scripts are run by bash in the sandbox, where no program of a trainer is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plimsoll.errors import ConfigError
from plimsoll.process.programs import find_sandbox
from plimsoll_convert import shell
from plimsoll_convert.launch import find_launches, programs_of, script_launches
from plimsoll_convert.shell import Expanded, script_commands

PACKAGE = programs_of("openrlhf.cli")
pytestmark = pytest.mark.skipif(
    find_sandbox().bubblewrap is None, reason=f"no sandbox here: {find_sandbox().trouble}"
)


def words(script: str, **given: str) -> list[tuple[str, ...]]:
    return [command.words for command in script_commands(script, "dir/run.sh", given)]


WORDS: dict[str, tuple[str, ...]] = {
    "a 'b c' \"d e\" f\\ g": ("b c", "d e", "f g"),
    "a \\\n  --b 1 \\\n  --c # not this": ("--b", "1", "--c"),
    "N=${1:-8}\na $((N * 2 + 1)) ${N,,}x": ("17", "8x"),
    "read -r -d '' B <<EOF\nx \\\n  --y 1\n$0\nEOF\na $B": ("x", "--y", "1", "dir/run.sh"),
    "B=$(cat <<'EOF'\n$x 1\nEOF\n)\na \"$B\"": ("$x 1",),
    'S="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"; a $S': (f"{Path.cwd()}/dir",),
    "a b > logs.txt 2>&1 && mkdir -p /x/y && a c > /x/y/log": ("b",),
    "A=(1 # no\n '2 3')\nA+=(4)\na \"${A[@]}\" ${A[1]} ${A[9]}": ("1", "2 3", "4", "2", "3"),
    'set -euo pipefail\nfalse\na "${N:-}x" "$@"': ("x",),
    "if [ $# -lt 1 ]; then exit 1; fi\nexec a b": ("b",),
    "nvidia-smi || exit 1\nfor i in 1 2; do B=$i; done\na $B": ("2",),
    'D=npu\ncase "$D" in gpu) A=1 ;; npu) A=2 ;; esac\na $A': ("2",),
    "while [[ $# -gt 0 ]]; do shift; done\nuntil ray status; do sleep 1; done\na b": ("b",),
    "/opt/conda/bin/python3 -m x\na b": ("b",),
}


def test_words_are_those_of_bash() -> None:
    for script, expected in WORDS.items():
        found = [command[1:] for command in words(script) if command[0] == "a"]
        assert found[0] == expected, script
    assert words("a $HOME/x") == [("a", str(Path.home() / "x"))]
    assert words("B=1\nPATH=/usr/bin\na $B", B="set") == [("a", "set")]
    assert words("CUDA_VISIBLE_DEVICES=0,3 a") == [("CUDA_VISIBLE_DEVICES=0,3", "a")]
    assert words("/opt/bin/python3 -m x") == [("python3", "-m", "x")]
    script = 'F="--b 1"\nsrun bash -c "pip install x && python -m a.b $F --c \\"d\\"" &>> log'
    assert words(script)[-1] == ("python", "-m", "a.b", "--b", "1", "--c", "d")
    assert ("a", "1") in words("set -x\na 1 2>&1 | tee a.log")


def test_what_only_the_machine_could_say_stays_and_is_named() -> None:
    script = "H=$(hostname)\nP=$H/x\n# N=1\nC=${C}\nR=$((8 / Q))\na $P $N $(date +%Y) $1 $C"
    command = script_commands(script, "run.sh", {})[-1]
    assert command.words == ("a", "$(hostname...)/x", "$N", "$(date...)", "$1", "$C")
    *named, failed = command.unknown
    assert [text.partition(": ")[0] for text in named] == [
        *("$(hostname...)", "$N", "$(date...)", "$1", "$C")
    ]
    assert failed.startswith("line 5: ") and "division by 0" in failed
    command = script_commands(script, "run.sh", {"H": "h", "N": "n", "1": "one"})[-1]
    assert command.words[1:] == ("h/x", "n", "$(date...)", "one", "$C")


def test_a_script_that_bash_cannot_read_is_named_by_its_line() -> None:
    with pytest.raises(ConfigError, match=r"^run\.sh:3: .*unexpected"):
        script_commands("x\ny\na 'b", "run.sh", {})
    with pytest.raises(ConfigError, match=r"^run\.sh:2: syntax error"):
        script_commands("if true; a", "run.sh", {})


def test_a_script_reaches_nothing_of_this_machine_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "_SECONDS", 1)
    secret = tmp_path / "secret"
    secret.write_text("word")
    script = f"""
        S=$(cat {secret}); echo > {tmp_path}/mark; a "x$S" {tmp_path}/* "$(cat /proc/1/environ)"
        /usr/bin/env b
        for i in 1 2 3 4 5 6 7 8 9; do cat /usr/bin/bash /usr/bin/bash > /f$i; done
        f() {{ f | f & }}; f
        while true; do :; done
    """
    commands = words(script)
    assert commands[0] == ("a", "x", f"{tmp_path}/*")
    assert os.listdir(tmp_path) == ["secret"]


def test_a_script_that_does_not_end_says_that_it_was_not_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shell, "_PRELUDE", shell._PRELUDE.replace(f"-t {shell._SECONDS}", "-t 1"))
    [first] = script_commands("a b\nwhile true; do :; done\nc", "run.sh", {})
    assert first.words == ("a", "b") and "what comes later" in first.unknown[-1]


def test_without_a_sandbox_the_command_itself_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match="after `--`"):
        script_commands("a", "run.sh", {})


def test_launches(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "CMD='openrlhf.cli.train_sft --x 1'\n"
        "echo $CMD\n"
        "deepspeed --num_gpus 4 --num_nodes=2 --module $CMD\n"
        "ray job submit --address='http://head:8265' -- python3 -m openrlhf.cli.train_ppo_ray --y\n"
        "CUDA_VISIBLE_DEVICES=0,3 python examples/openrlhf/cli/train_dpo.py\n"
        "torchrun --nproc-per-node 8 -m openrlhf.cli.train_rm\n"
        "deepspeed --include localhost:0,1,2 --module openrlhf.cli.train_kto\n"
    )
    launches = script_launches(str(file), {}, PACKAGE)
    assert [
        (launch.program, launch.line, launch.cards, launch.nodes, launch.address)
        for launch in launches
    ] == [
        ("train_sft", 3, 4, 2, None),
        ("train_ppo_ray", 4, None, None, "head"),
        ("train_dpo", 5, 2, None, None),
        ("train_rm", 6, 8, None, None),
        ("train_kto", 7, 3, None, None),
    ]
    assert launches[0].arguments == ("--x", "1") and launches[0].started_by == "deepspeed"
    assert find_launches(["python", "train.py"], PACKAGE) == []
    assert Expanded(1, ("a",)).unknown == ()
