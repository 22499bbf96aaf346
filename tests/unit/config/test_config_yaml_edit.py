"""Keys written anew in a text of YAML: it says what was wanted, and all else is as it was."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import ndiff

import pytest
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.config.flags import Flag, apply_flags, write_flags
from plimsoll.config.yaml_tree import read_tree, write_tree, write_value
from plimsoll.errors import ConfigError

TEXT = """\
# ppo: a comment at the top

run: {directory: out, steps: 10}   # in flow style

actor: &trained                    # an anchor
  model:
    path: some/model               # what learns
    gradient_checkpointing: true
  zero: {stage: 2}                 # divided
  # the learning rate of the paper
  optimizer: {learning_rate: 1e-6}

critic: *trained                   # the same

reference:
rollout:
  sampling:
    stop:
    - "a: b"
    - c
"""


def edited(text: str, values: Mapping[str, object]) -> str:
    flags = [Flag(tuple(key.split(".")), value) for key, value in values.items()]
    new = write_flags(text, "ppo.yaml", flags)
    wanted = apply_flags(read_tree(text, "ppo.yaml"), flags).values
    assert read_tree(new, "ppo.yaml").values == wanted
    return new


def changed_lines(text: str, values: Mapping[str, object]) -> list[str]:
    lines = ndiff(text.splitlines(), edited(text, values).splitlines())
    return [line for line in lines if line[0] in "+-"]


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        (
            {"run.steps": 20},
            [
                "- run: {directory: out, steps: 10}   # in flow style",
                "+ run: {directory: out, steps: 20}   # in flow style",
            ],
        ),
        (
            {"actor.zero.stage": 3, "critic.zero.stage": 3},  # the anchor's is the alias's, too
            [
                "-   zero: {stage: 2}                 # divided",
                "+   zero: {stage: 3}                 # divided",
            ],
        ),
        (
            {"actor.adapter.rank": 16, "critic.adapter.rank": 16},
            ["+   adapter:", "+     rank: 16"],
        ),
        (
            {"reference.zero.offload": "cpu", "rollout.sampling.seed": 1, "rollout.engines": 2},
            ["+   zero:", "+     offload: cpu", "+     seed: 1", "+   engines: 2"],
        ),
        (
            {"rollout.sampling.stop": ("d",)},
            ["-     stop:", "+     stop: [d]", '-     - "a: b"', "-     - c"],
        ),
        ({"cluster.nodes": 2}, ["+ cluster:", "+   nodes: 2"]),
    ],
)
def test_only_what_is_wanted_changes(values: dict[str, object], lines: list[str]) -> None:
    assert changed_lines(TEXT, values) == lines


def test_an_alias_is_written_out_where_it_differs_from_the_anchor() -> None:
    removed = f"- critic: *trained{'# the same':>29}"
    written = [f"+ critic:{'# the same':>29}", "+   model:", "+     path: some/model"]
    divided = f"+   zero: {{stage: 3}}{'# divided':>26}"
    for key in ("critic.zero.stage", "actor.zero.stage"):
        lines = changed_lines(TEXT, {key: 3})
        assert removed in lines
        assert [line for line in lines if line in written] == written
        assert (divided in lines) == (key[0] == "a")


@pytest.mark.parametrize(
    "text", ["", "# only words\n", "{}", "{run: {}}", "run: {steps: 1}", "---\nrun:\n"]
)
def test_keys_are_added_to_whatever_is_there(text: str) -> None:
    new = edited(text, {"run.steps": 5, "actor.model.path": "a # b", "actor.zero.stage": 1})
    assert new.startswith("# only words") == text.startswith("#")


def test_a_layout_that_cannot_be_edited_is_refused_with_the_flags_that_do_it() -> None:
    text = "first: [&word a]\nsecond: *word\n"  # the anchor goes with the list
    with pytest.raises(ConfigError, match=r"ppo\.yaml: .* flags: --a\.first \[d\]"):
        edited(f"a:\n  {text.replace(chr(10), chr(10) + '  ').strip()}", {"a.first": ("d",)})


@pytest.mark.parametrize("value", ["0,", "a, b", "]", "a: b"])
def test_a_text_within_brackets_is_quoted_as_they_need(value: str) -> None:
    text = edited("a: {b: null}\n", {"a.b": value})
    assert read_tree(text, "x").values == {"a": {"b": value}}


NAMES = st.sampled_from(["a", "b", "c", "d", "on", "1"])
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8), st.lists(st.integers(0, 3), max_size=2).map(tuple),
)  # fmt: skip
TREES = st.dictionaries(
    NAMES, st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner, max_size=3)), max_size=4
)
FLAGS = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map(tuple), LEAVES, min_size=1, max_size=3
)


@settings(max_examples=percent(200))
@given(values=TREES, flags=FLAGS, flows=st.booleans())
def test_written_flags_read_back_as_the_same_values(
    values: dict[str, object], flags: dict[tuple[str, ...], object], flows: bool
) -> None:
    text = f"{write_value(values)}\n" if flows else write_tree(values)
    made = [Flag(path, value) for path, value in flags.items()]
    try:
        wanted = apply_flags(read_tree(text, "x"), made).values
    except ConfigError:  # a value where a section would have to be
        return
    assert read_tree(write_flags(text, "x", made), "x").values == wanted
