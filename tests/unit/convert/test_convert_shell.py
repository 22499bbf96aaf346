"""Scripts are read as bash reads them, without running anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.convert.expand import Expanded, script_commands
from plimsoll.convert.launch import find_launches, of_package, script_launches
from plimsoll.errors import ConfigError

PACKAGE = of_package("openrlhf.cli")


def words(script: str, **given: str) -> list[tuple[str, ...]]:
    return [one.words for one in script_commands(script, "dir/run.sh", given)]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("a 'b c' \"d e\" f\\ g", ("a", "b c", "d e", "f g")),
        ("a $'x\\ny' '$B' \"\"", ("a", "x\ny", "$B", "")),
        ("a \\\n  --b 1 \\\n  --c # not this", ("a", "--b", "1", "--c")),
        ("a x#y > out.log 2>&1", ("a", "x#y")),
        ('B="1 2"; a $B "$B" ${B}3', ("a", "1", "2", "1 2", "1", "23")),
        ("B=1 C=2\na $B$C", ("a", "12")),
        ("N=${1:-8}\na $((N * 2 + 1)) $((-N / 3)) $((N % 5))", ("a", "17", "-3", "3")),
        (
            "read -r -d '' B <<EOF\nx \\\n  --y 1\n$0\nEOF\na $B",
            ("a", "x", "--y", "1", "dir/run.sh"),
        ),
        ("B=$(cat <<'EOF'\n$x 1\nEOF\n)\na \"$B\"", ("a", "$x 1")),
        ('D="$(dirname "$0")"; a $(basename /x/y.sh) $D', ("a", "y.sh", "dir")),
        ("if [[ ${1} != x ]]; then\n  a b\nfi", ("a", "b")),
        ("a b && c", ("a", "b")),
    ],
)
def test_words(script: str, expected: tuple[str, ...]) -> None:
    assert [one for one in words(script) if one[0] == "a"] == [expected]


def test_arrays_are_split_where_they_are_not_quoted() -> None:
    script = "A=(1 # no\n '2 3')\nA+=(4)\na ${A[@]} \"${A[@]}\" ${A[1]}"
    assert words(script) == [("a", "1", "2", "3", "4", "1", "2 3", "4", "2", "3")]


def test_a_default_stands_for_what_is_not_set() -> None:
    assert words('a ${B:-x y} "${B:-x y}" ${B-}') == [("a", "x", "y", "x y")]
    assert words("a ${B:-x}", B="set") == [("a", "set")]


def test_what_is_not_known_stands_as_it_was_and_is_named() -> None:
    script = "H=$(hostname)\nP=$H/x\na $P $NOWHERE $(date +%Y)"
    [found] = script_commands(script, "run.sh", {})
    assert found.words == ("a", "$(hostname)/x", "$NOWHERE", "$(date +%Y)")
    assert found.unknown == (
        "$(hostname): a command, which is not run",
        "$NOWHERE: NOWHERE is set nowhere before",
        "$(date +%Y): a command, which is not run",
    )
    [found] = script_commands(script, "run.sh", {"H": "h", "NOWHERE": "n"})
    assert found.words == ("a", "h/x", "n", "$(date +%Y)")


def test_a_variable_with_two_values_is_named() -> None:
    *_, found = script_commands("A=1\nif x\nthen A=2\nfi\na $A", "run.sh", {})
    assert found.words == ("a", "2")
    assert found.unknown == ("$A: it is set more than once, and the last value counts",)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('D=gpu\ncase "$D" in\n gpu) A=1 ;;\n npu) A=2 ;;\nesac\na $A', "1"),
        ("D=npu\ncase $D in gpu | npu) ;; *) exit 1 ;; esac\nA=1\na $A", "1"),
        ("D=x\ncase $D in\n # which\n (g*) A=1;;\n *) A=3\nesac\na $A", "3"),
        ('A=1\nif [ "$A" = 2 ]; then A=3; elif [ $A -eq 1 ]; then A=4; else A=5; fi\na $A', "4"),
        ('if [[ -z "${B:-}" && x = x ]]; then A=1; fi\na $A', "1"),  # not worked out: read through
        ('B=\nif [ -z "$B" ]; then B=1; A=2; else A=3; fi\na $A', "2"),
        ("B=v2\nif [[ $B != v* ]]; then A=1; else A=2; fi\na $A", "2"),
        ("A=1\nif ! [ $A = 1 ]; then A=2; fi\na $A", "2"),
        ("A=1\nif [ $A = 2 ]; then\n if x; then A=3; fi\n A=4\nfi\na $A", "1"),
        ('A=()\nif [ "$#" -lt 1 ]; then A+=(1); fi\na "${A[@]}" "$@" ${@:2}', "1"),
    ],
)
def test_branches_that_are_known_are_taken_or_left(script: str, expected: str) -> None:
    assert words(script)[-1] == ("a", expected)


def test_a_value_of_a_known_branch_is_certain() -> None:
    script = "A=\ncase gpu in gpu) A=${A:-8} ;; esac\na $A"
    assert script_commands(script, "run.sh", {})[-1].unknown == ()
    [*_, found] = script_commands(f"for x in 1 2; do {script}; done", "run.sh", {})
    assert found.unknown == ("$A: it is set more than once, and the last value counts",)


def test_what_an_unknown_branch_adds_is_named() -> None:
    script = 'A=(1)\nif [ "$NODES" = 2 ]; then A+=(2); fi\na "${A[@]}"'
    [*_, found] = script_commands(script, "run.sh", {})
    assert found.words == ("a", "1", "2")
    assert found.unknown == ("$A: it is set more than once, and the last value counts",)
    [*_, found] = script_commands(script, "run.sh", {"NODES": "1"})
    assert found == Expanded(3, ("a", "1"))


def test_home_is_known() -> None:
    assert words("a $HOME/x") == [("a", str(Path.home() / "x"))]


def test_a_folder_of_a_command_is_reckoned(tmp_path: Path) -> None:
    script = 'S="$(dirname "$0")"\nW=$(cd "$S/../.." && pwd)\na ${W}/exp'
    [found] = script_commands(script, f"{tmp_path}/examples/scripts/x.sh", {})
    assert found.words == ("a", f"{tmp_path}/exp") and not found.unknown


def test_a_script_within_a_script() -> None:
    script = 'F="--b 1"\nsrun bash -c "pip install x && python -m a.b \\\n $F --c \\"d\\"" &>> log'
    assert words(script)[-1] == ("python", "-m", "a.b", "--b", "1", "--c", "d")


@pytest.mark.parametrize(
    "script", ["a 'b", 'a "b', "a $(b", "a ${b", "A=(1 2", "a <<EOF\nb", "a `b"]
)
def test_what_is_not_closed_is_named_by_its_line(script: str) -> None:
    with pytest.raises(ConfigError, match=r"^run\.sh:3: what begins here is not closed"):
        script_commands(f"x\ny\n{script}", "run.sh", {})


PIECES = [
    *"aA=(){}[]$'\"`\\<>|&;#:-+@*! \n\t0E",
    *("if ", "then ", "else ", "elif ", "fi\n", "case ", " in ", "esac\n", ";; ", "do ", "done\n"),
    "[ a = a ]; ",
]
SHELL = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


@given(SHELL)
def test_no_text_ends_in_anything_but_words_or_an_error(text: str) -> None:
    try:
        script_commands(text, "run.sh", {"A": "b c"})
    except ConfigError as error:
        assert str(error).startswith("run.sh:")


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
    found = script_launches(str(file), {}, PACKAGE)
    assert [(one.program, one.line) for one in found] == [
        ("train_sft", 3),
        ("train_ppo_ray", 4),
        ("train_dpo", 5),
        ("train_rm", 6),
        ("train_kto", 7),
    ]
    assert [(one.cards, one.nodes) for one in found] == [
        (4, 2),
        (None, None),
        (2, None),
        (8, None),
        (3, None),
    ]
    assert [one.address for one in found] == [None, "head", None, None, None]
    assert found[0].arguments == ("--x", "1") and found[0].started_by == "deepspeed"
    assert find_launches(["python", "train.py"], PACKAGE) == []
