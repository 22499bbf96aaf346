"""Scripts are read as bash reads them, without running anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import ConfigError
from plimsoll.interop.convert.launch import find_launches, programs_of, script_launches
from plimsoll.interop.convert.shell import Expanded, script_commands

PACKAGE = programs_of("openrlhf.cli")
TWICE = "$A: it is set more than once, and the last value counts"


def words(script: str, **given: str) -> list[tuple[str, ...]]:
    return [command.words for command in script_commands(script, "dir/run.sh", given)]


WORDS: dict[str, tuple[str, ...]] = {
    "a 'b c' \"d e\" f\\ g": ("b c", "d e", "f g"),
    "a $'x\\ny' '$B' \"\"": ("x\ny", "$B", ""),
    "a \\\n  --b 1 \\\n  --c # not this": ("--b", "1", "--c"),
    "a x#y > out.log 2>&1": ("x#y",),
    'B="1 2"; a $B "$B" ${B}3 "\\$B \\x $ y"': ("1", "2", "1 2", "1", "23", "$B \\x $ y"),
    "B=1 C=2\na $B$C /x/$B/$C": ("12", "/x/1/2"),
    "B=/r D=$B/x/$B/y\na $D": ("/r/x//r/y",),  # the grammar cuts such a word
    "N=${1:-8}\na $((N * 2 + 1)) $((-N / 3)) $((${N} % 5))": ("17", "-3", "3"),
    "read -r -d '' B <<EOF\nx \\\n  --y 1\n$0\nEOF\na $B": ("x", "--y", "1", "dir/run.sh"),
    "B=$(cat <<'EOF'\n$x 1\nEOF\n)\na \"$B\"": ("$x 1",),
    "B=1\nC=$(cat <<-EOF\n\tx $B\n\ty\n\tEOF\n)\na $C": ("x", "1", "y"),
    'D="$(dirname "$0")"; a $(basename /x/y.sh) $D': ("y.sh", "dir"),
    "if [[ ${1} != x ]]; then\n  a b\nfi": ("b",),
    "a b && c": ("b",),
    'a ${B:-x y} "${B:-"x y"}" ${B-} ${B:+z}': ("x", "y", "x y"),
    "B=1\na ${B:+z} ${B:-x} ${C:=2} $C": ("z", "1", "2", "2"),
    "A=(1 # no\n '2 3')\nA+=(4)\na ${A[@]} \"${A[@]}\" ${A[1]} ${A[9]}": (
        "1",
        "2",
        "3",
        "4",
        "1",
        "2 3",
        "4",
        "2",
        "3",
    ),
    'A=x\nA+=y\na $A "$@" ${@:2}': ("xy",),
}
BRANCHES = {
    'D=gpu\ncase "$D" in\n gpu) A=1 ;;\n npu) A=2 ;;\nesac': "1",
    "D=npu\ncase $D in gpu | npu) ;; *) exit 1 ;; esac\nA=1": "1",
    "D=x\ncase $D in\n # which\n (g*) A=1;;\n *) A=3\nesac": "3",
    'A=1\nif [ "$A" = 2 ]; then A=3; elif [ $A -eq 1 ]; then A=4; else A=5; fi': "4",
    'if [[ -z "${B:-}" && x = x ]]; then A=1; fi': "1",  # not worked out: read through
    'B=\nif [ -z "$B" ]; then B=1; A=2; else A=3; fi': "2",
    "B=v2\nif [[ $B != v* ]]; then A=1; else A=2; fi": "2",
    'B=v\nif [[ -n "$B" ]]; then A=1; fi': "1",
    "A=1\nif ! [ $A = 1 ]; then A=2; fi": "2",
    "A=1\nif [ $A = 2 ]; then\n if x; then A=3; fi\n A=4\nfi": "1",
    'A=\nif [ "$#" -lt 1 ]; then A=1; fi': "1",
}


def test_words_are_expanded() -> None:
    for script, expected in WORDS.items():
        expanded = [command[1:] for command in words(script) if command[0] == "a"]
        assert expanded == [expected], script
    assert words("a ${B:-x}", B="set") == [("a", "set")]
    assert words("a $HOME/x") == [("a", str(Path.home() / "x"))]
    assert words("B=1 \\\n a")[0] == ("B=1", "a") and words("B=1\na")[0] == ("a",)


def test_branches_that_are_known_are_taken_or_left() -> None:
    for script, expected in BRANCHES.items():
        assert words(f"{script}\na $A")[-1] == ("a", expected), script


def test_unknown_variables_stay_and_are_named() -> None:
    script = "H=$(hostname)\nP=$H/x\na $P $NOWHERE $(date +%Y) ${B%x} $((Q + 1))"
    [command] = script_commands(script, "run.sh", {})
    stays = ("$(date +%Y)", "${B%x}", "$((Q + 1))")
    assert command.words == ("a", "$(hostname)/x", "$NOWHERE", *stays)
    assert [text.partition(": ")[0] for text in command.unknown] == [
        "$(hostname)",
        "$NOWHERE",
        "$(date ...)",
        *stays[1:],
    ]
    [command] = script_commands(script, "run.sh", {"H": "h", "NOWHERE": "n"})
    assert command.words[:3] == ("a", "h/x", "n")


def test_a_variable_with_two_values_is_named() -> None:
    [*_, command] = script_commands("A=1\nif x\nthen A=2\nfi\na $A", "run.sh", {})
    assert command.words == ("a", "2") and command.unknown == (TWICE,)
    script = "A=\ncase gpu in gpu) A=${A:-8} ;; esac\na $A"
    assert script_commands(script, "run.sh", {})[-1].unknown == ()
    [*_, command] = script_commands(f"for x in 1 2; do {script}; done", "run.sh", {})
    assert command.unknown == (TWICE,)
    script = 'A=(1)\nif [ "$NODES" = 2 ]; then A+=(2); fi\na "${A[@]}"'
    [*_, command] = script_commands(script, "run.sh", {})
    assert command.words == ("a", "1", "2") and command.unknown == (TWICE,)
    assert script_commands(script, "run.sh", {"NODES": "1"})[-1] == Expanded(3, ("a", "1"))


def test_folders_and_scripts_within_a_script(tmp_path: Path) -> None:
    script = 'S="$(dirname "$0")"\nW=$(cd "$S/../.." && pwd)\na ${W}/exp'
    [command] = script_commands(script, f"{tmp_path}/examples/scripts/x.sh", {})
    assert command.words == ("a", f"{tmp_path}/exp") and not command.unknown
    script = 'F="--b 1"\nsrun bash -c "pip install x && python -m a.b \\\n $F --c \\"d\\"" &>> log'
    assert words(script)[-1] == ("python", "-m", "a.b", "--b", "1", "--c", "d")


@pytest.mark.parametrize("script", ["a 'b", 'a "b', "a $(b", "a ${b", "A=(1 2", "a <<E\nb", "a `b"])
def test_an_unclosed_quote_or_bracket_is_named_by_its_line(script: str) -> None:
    with pytest.raises(ConfigError, match=r"^run\.sh:3: .*not closed"):
        script_commands(f"x\ny\n{script}", "run.sh", {})


def test_a_script_that_nests_too_deeply_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^run\.sh: .*nested too deeply"):
        script_commands("(" * 3000 + "a" + ")" * 3000, "run.sh", {})
    commands = script_commands(" && ".join(["a"] * 50), "run.sh", {})
    assert len(commands) == 50


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


@pytest.mark.parametrize(
    "script",
    [
        "A=(x x)\n" + "A=(${A[@]} ${A[@]})\n" * 50 + "run ${A[@]}",
        "A=(x)\n" + 'A+=("${A[@]}")\n' * 50 + "run",
        "A=xx\n" + 'A="$A$A"\n' * 50 + "run $A",
        "A=xx\n" + "A+=$A\n" * 50 + "run $A",
        "A=xx\n" + "read A <<END\n$A$A\nEND\n" * 50 + "run",
        f"A={'x' * 9999}\nrun {'$A' * 9999}",
    ],
    ids=["array", "appended", "text", "appended-text", "document", "word"],
)
def test_variables_that_double_are_refused_at_their_line(script: str) -> None:
    with pytest.raises(ConfigError, match=r"^run\.sh:\d+: expanded, this has over 1,000,000"):
        script_commands(script, "run.sh", {})


def test_scripts_in_variables_run_each_other_up_to_a_limit() -> None:
    lines = [
        "A0='run x'",
        *(f'A{i}=\'bash -c "$A{i - 1}"; bash -c "$A{i - 1}"\'' for i in range(1, 19)),
    ]
    with pytest.raises(ConfigError, match=r"^run\.sh: it runs over 10,000 commands"):
        script_commands("\n".join([*lines, 'bash -c "$A18"']), "run.sh", {})
