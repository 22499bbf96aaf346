"""Reading YAML: plain words, lines, and what is refused."""

from __future__ import annotations

import pytest
from examples import percent
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plimsoll.config.yaml_tree import read_tree, read_value, write_tree
from plimsoll.errors import ConfigError

SCALARS: st.SearchStrategy[object] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**17), 10**17),
    st.text(),
    st.floats(allow_nan=False),
)
TREES = st.dictionaries(
    st.text(),
    st.recursive(
        SCALARS, lambda inner: st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner)
    ),
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1e3", 1000),
        ("1e30", 1e30),
        ("1.5E+3", 1500),
        (".5", 0.5),
        ("3.", 3.0),
        ("-2", -2),
        ("1_000", 1000),
        ("0", 0),
        ("true", True),
        ("null", None),
        ("", None),
        ("no", "no"),
        ("010", "010"),
        ("12:30", "12:30"),
        ("2024-01-02", "2024-01-02"),
        ("none", "none"),
        ("1.2.3", "1.2.3"),
        ("'1'", "1"),
        ("[a, 2]", ("a", 2)),
    ],
)
def test_words_mean_the_same_in_a_file_and_in_a_flag(text: str, value: object) -> None:
    read = read_tree(f"key: {text}", "f").values["key"]
    assert (read, type(read)) == (value, type(value))
    flag = read_value(text)
    assert (flag, type(flag)) == (value, type(value))


@pytest.mark.parametrize("text", ["#### 42", "a: b", "*", "&x", "!tag", "%d", "a # b", "-", "|"])
def test_a_flag_that_looks_like_yaml_syntax_stands_for_itself(text: str) -> None:
    assert read_value(text) == text


@example({"<<": None})
@settings(max_examples=percent(30))
@given(TREES)
def test_what_is_written_is_read_back(tree: dict[str, object]) -> None:
    assert read_tree(write_tree(tree), "f").values == tree


def test_every_key_knows_its_line() -> None:
    tree = read_tree("a:\n  b: 1\n  c:\n    - 2\nd: {e: 3}\n", "run.yaml")
    assert tree.origins == {
        ("a",): "run.yaml:1",
        ("a", "b"): "run.yaml:2",
        ("a", "c"): "run.yaml:3",
        ("d",): "run.yaml:5",
        ("d", "e"): "run.yaml:5",
    }


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"c\.yaml is nested too deeply"):
        read_tree("a: " + "[" * 5000 + "]" * 5000, "c.yaml")


def test_an_alias_repeats_its_anchor() -> None:
    tree = read_tree("a: &m {path: x}\nb: *m\n", "f")
    assert tree.values == {"a": {"path": "x"}, "b": {"path": "x"}}


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_file_is_an_empty_mapping(text: str) -> None:
    assert read_tree(text, "f").values == {}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", ["f:4", "b.c", "second time", "f:3"]),
        ("- 1\n- 2\n", ["f", "a list", "mapping"]),
        ("just words", ["'just words'", "mapping"]),
        ("a: [1, 2", ["f:1", "not YAML"]),
        ("a: 1\n\tb: 2\n", ["f:2:1", "not YAML"]),
        ("a: 1\n--- \nb: 2\n", ["f:2", "not YAML"]),
        ("a: &x [*x]\n", ["f:1", "contains itself"]),
        ("a: !!python/name:os.system x\n", ["f:1", "python/name"]),
        ("a: !!int x\n", ["f:1", "'x'"]),
        ("a: !!bool x\n", ["f:1", "'x'"]),
        ("a: !!set {x, y}\n", ["f:1", "tag"]),
        ("? [a]\n: 1\n", ["f:1", "key"]),
        ("x: &x {a: 1}\nb:\n  <<: *x\n", ["f:3", "merge keys"]),
        ("a: \x00", ["f", "not YAML"]),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_tree(text, "f")
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_aliases_of_aliases_are_refused_before_they_fill_the_memory() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match=r"^c\.yaml:1: there are over 100,000"):
        read_tree("\n".join(lines), "c.yaml")
    assert read_tree("a: &a [1, 2]\nb: [*a, *a]", "c.yaml").values["b"] == ((1, 2), (1, 2))
