"""Dotted flags: parting a command line, reading values, setting them in a tree."""

from __future__ import annotations

import pytest

from plimsoll.config.flags import apply_flags, parse_flags, split_flags
from plimsoll.config.yaml_tree import Tree, origin_of, read_tree
from plimsoll.errors import ConfigError


def with_flags(text: str, *flags: str) -> Tree:
    return apply_flags(read_tree(text, "run.yaml"), parse_flags(flags))


def test_flags_are_parted_from_the_rest_wherever_they_stand() -> None:
    words = ["--a.b", "1", "run.yaml", "--dry-run", "--c.d=x=y", "--e.f", "-1", "--help", "a.b"]
    assert split_flags(words) == (
        ["run.yaml", "--dry-run", "--help", "a.b"],
        ["--a.b", "1", "--c.d=x=y", "--e.f", "-1"],
    )


def test_both_forms_give_the_same_value() -> None:
    assert parse_flags(["--a.b", "1e-3"]) == parse_flags(["--a.b=1e-3"])
    assert parse_flags(["--a.b=x=y"])[0].value == "x=y"
    assert parse_flags(["--a.b=--c.d"])[0].value == "--c.d"


def test_a_preset_is_a_flag_without_a_section() -> None:
    words = ["run.yaml", "--preset", "grpo", "--dry-run"]
    assert split_flags(words) == (["run.yaml", "--dry-run"], ["--preset", "grpo"])
    assert with_flags("preset: rloo\n", "--preset=grpo").values == {"preset": "grpo"}


def test_a_flag_wins_over_the_file_and_is_named_as_the_origin() -> None:
    tree = with_flags("a: {b: 1, c: 2}\n", "--a.b", "5")
    assert tree.values == {"a": {"b": 5, "c": 2}}
    assert tree.origins[("a", "b")] == "flag --a.b"
    assert tree.origins[("a", "c")] == "run.yaml:1"


def test_a_section_that_flags_changed_in_part_names_them_beside_the_file() -> None:
    tree = with_flags("a: {b: {x: 1}, c: 2}\n", "--a.b.x", "5")
    assert origin_of(tree.origins, ("a", "b")) == "run.yaml:1, flag --a.b.x"
    assert origin_of(tree.origins, ("a", "b", "x")) == "flag --a.b.x"
    assert origin_of(tree.origins, ("a", "c")) == "run.yaml:1"
    assert origin_of(tree.origins, ("d",)) == ""


def test_flags_make_missing_and_empty_sections() -> None:
    tree = with_flags("a:\n", "--a.b.c", "x", "--a.b.d", "true", "--e.f", "[1, 2]")
    assert tree.values == {"a": {"b": {"c": "x", "d": True}}, "e": {"f": (1, 2)}}


def test_the_tree_given_is_not_changed() -> None:
    before = read_tree("a: {b: {c: 1}}", "f")
    apply_flags(before, parse_flags(["--a.b.c", "2"]))
    assert before == read_tree("a: {b: {c: 1}}", "f")


def test_a_flag_for_one_alias_leaves_the_other() -> None:
    tree = with_flags("a: &m {x: 1}\nb: *m\n", "--a.x", "2")
    assert tree.values == {"a": {"x": 2}, "b": {"x": 1}}


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--a.b", "1", "--a.b=2"], ["--a.b is given twice"]),
        (["--a.b", "{}", "--a.b.c", "2"], ["--a.b", "--a.b.c", "same key"]),
        (["--a.b.c", "2", "--a.b", "{}"], ["--a.b", "--a.b.c", "same key"]),
        (["--a.b"], ["--a.b", "no value"]),
        (["--a.b", "--c.d", "1"], ["--a.b", "no value"]),
        (["--a..b", "1"], ["--a..b"]),
        (["--.a", "1"], ["--.a"]),
        (["x"], ["'x'", "--section.key"]),
        (["--a.b", "[1, 2"], ["--a.b", "'[1, 2'", "quotes"]),
        (["--a.b", "[a-z]+"], ["--a.b", "'[a-z]+'", "quotes"]),
        (["--a.b", "'x"], ["--a.b", "quotes"]),
        (["--a.b", "{x: 1, x: 2}"], ["--a.b"]),
    ],
)
def test_bad_flags_are_refused(flags: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_flags(flags)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_flag_below_a_value_is_refused_with_the_line_of_the_value() -> None:
    with pytest.raises(ConfigError, match=r"--a\.b\.c .*a\.b is 3 \(run\.yaml:1\)"):
        with_flags("a: {b: 3}", "--a.b.c", "1")
