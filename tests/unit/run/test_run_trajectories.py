"""What was sampled, on the disk: written and read whole, and as people read it."""

from __future__ import annotations

import pickle
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.errors import ConfigError
from plimsoll.records import (
    ADVANTAGES,
    COLUMNS,
    RETURNS,
    SAMPLED,
    SAMPLER_LOGPROBS,
    TEACHER_LOGPROBS,
    TOKEN_REWARDS,
    TRAINER_LOGPROBS,
    VALUES,
    WEIGHT_VERSIONS,
    Prompt,
    RewardPart,
    Trajectory,
    Turn,
    single_turn,
    to_runs,
)
from plimsoll.run.directory import RunDirectory
from plimsoll.run.responses import SampledResponse, read_groups, read_responses, read_some
from plimsoll.run.trajectories import (
    from_bytes,
    iter_bounded,
    read_trajectories,
    row_groups_of,
    to_bytes,
    write_trajectories,
)


def trajectory(index: int, sample: int, tokens: list[int]) -> Trajectory:
    return single_turn(
        prompt=Prompt(
            index, np.array([1, 2], np.int32), f"What is {index}?", str(index), "sums", {"level": 3}
        ),
        sample_index=sample,
        response_tokens=np.array(tokens, np.int32),
        sampler_logprobs=np.array([-0.5] * len(tokens), dtype=np.float32),
        response_text=f"It is {index}.",
        finish_reason="stop",
        weight_version=3,
        rewards=(RewardPart("right", 1.0, 2.0), RewardPart("form", 0.5)),
        group=index - 7,
    )


def floats(*values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, np.float32)


def test_experts_are_written_and_read_if_there_are_any(tmp_path: Path) -> None:
    few = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    many = np.full((2, 1, 2), 300, np.int16)
    first, second, third = (trajectory(7, i, [11, 12]) for i in range(3))
    step = [replace(first, routing=few, earlier=(replace(second, routing=many),)), third]
    write_trajectories(tmp_path / "step.parquet", 1, step)
    read = read_trajectories(tmp_path / "step.parquet")
    for found in (read, from_bytes(to_bytes(step))):
        [branch] = found[0].earlier
        for own, want in ((found[0].routing, few), (branch.routing, many)):
            assert own is not None and own.dtype == want.dtype and np.array_equal(own, want)
        assert found[1].routing is None
    write_trajectories(tmp_path / "plain.parquet", 1, [third])
    assert "routing" not in pq.read_schema(tmp_path / "plain.parquet").names


def test_a_row_has_what_people_and_training_need(tmp_path: Path) -> None:
    step = [
        replace(trajectory(7, 0, [11, 12]), loss_mask=np.array([True, False])),
        trajectory(7, 1, []),
        replace(trajectory(8, 0, [13]), rewards=(RewardPart("form", 0.25, 2.0),)),
    ]
    advantages = [floats(0.25, 0), floats(), floats(-1)]
    logprobs = [floats(-0.5, 0), floats(), floats(-0.125)]
    scored = [
        t.add_columns({ADVANTAGES: a, TRAINER_LOGPROBS: p})
        for t, a, p in zip(step, advantages, logprobs, strict=True)
    ]
    write_trajectories(tmp_path / "step.parquet", 12, scored)
    table = pq.read_table(tmp_path / "step.parquet")
    right = {"name": "right", "value": 1.0, "weight": 2.0}
    form = {"name": "form", "value": 0.5, "weight": 1.0}
    assert table.to_pydict() == {
        "step": [12, 12, 12],
        "group": [0, 0, 1],
        "prompt_index": [7, 7, 8],
        "sample_index": [0, 1, 0],
        "source": ["sums", "sums", "sums"],
        "columns": ['{"level": 3}'] * 3,
        "prompt": ["What is 7?", "What is 7?", "What is 8?"],
        "prompt_tokens": [[1, 2]] * 3,
        "response": ["It is 7.", "It is 7.", "It is 8."],
        "tokens": [[11, 12], [], [13]],
        "loss_mask": [[True, False], [], [True]],
        "reference": ["7", "7", "8"],
        "reward": [2.5, 2.5, 0.5],
        "reward_right": [1.0, 1.0, None],
        "reward_form": [0.5, 0.5, 0.25],
        "parts": [[right, form], [right, form], [{"name": "form", "value": 0.25, "weight": 2.0}]],
        "advantage_mean": [0.25, 0.0, -1.0],  # over the tokens that are learned
        "advantages": [[0.25, 0.0], [], [-1.0]],
        "sampler_logprobs": [[-0.5, -0.5], [], [-0.5]],
        "trainer_logprobs": [[-0.5, 0.0], [], [-0.125]],
        **dict.fromkeys(("reference_logprobs", "values", "returns"), [None] * 3),
        **dict.fromkeys(("teacher_logprobs", "token_rewards"), [None] * 3),
        "row": [None] * 3,
        "weight_version": [3, None, 3],  # one without tokens
        "weight_versions": [[3, 3], [], [3]],
        "finish_reason": ["stop", "stop", "stop"],
    }
    for name in ("advantages", "sampler_logprobs", "trainer_logprobs"):
        assert table.schema.field(name).type == pa.list_(pa.float32())
    for name in ("tokens", "weight_versions"):
        assert table.schema.field(name).type == pa.list_(pa.int32())


def test_what_is_not_known_of_tokens_is_null(tmp_path: Path) -> None:
    path = tmp_path / "step.parquet"
    write_trajectories(path, 1, [trajectory(7, 0, [11])])
    table = pq.read_table(path)
    for name in ("advantage_mean", "advantages", "trainer_logprobs"):
        assert table[name].to_pylist() == [None]


def test_what_rewards_read_of_a_row_and_what_models_gave_comes_back(tmp_path: Path) -> None:
    """A column that a model did not give is absent."""
    path, messages = tmp_path / "step.parquet", ({"role": "user", "content": "What is 7?"},)
    whole = trajectory(7, 0, [11, 12])
    prompt = replace(whole.prompt, messages=messages, named={"answer": "7"}, is_text=True)
    first = trajectory(7, 0, [11]).add_columns({VALUES: floats(0.5), RETURNS: floats(3)})
    branched = replace(whole, prompt=prompt, earlier=(first,))
    scored = branched.add_columns({VALUES: floats(1, 2), RETURNS: floats(4, 5)})
    write_trajectories(path, 1, [scored])
    [read] = read_trajectories(path, COLUMNS.values())
    assert (read.prompt.messages, read.prompt.named, read.prompt.is_text) == (
        *(messages, {"answer": "7"}, True),
    )
    for column, expected in ((VALUES, [[0.5], [1, 2]]), (RETURNS, [[3], [4, 5]])):
        assert [branch.columns[column].tolist() for branch in read.branches] == expected
    assert not {ADVANTAGES, TEACHER_LOGPROBS} & read.columns.keys()
    [sampled] = read_trajectories(path)
    assert all(branch.columns.keys() <= {*SAMPLED} for branch in sampled.branches)


def test_a_step_is_written_by_parts_with_the_columns_that_any_of_its_trajectories_has(
    tmp_path: Path,
) -> None:
    step, path = [trajectory(7, i, [11, i]) for i in range(513)], tmp_path / "step.parquet"
    turn, part = Turn("assistant", 0, 1, "a"), RewardPart("late", 0.25)
    prompt = replace(step[-1].prompt, reference_value=7, environment="tool")
    earlier = (replace(trajectory(7, 512, [5]), prompt=prompt, rewards=()),)
    last = replace(step[-1], prompt=prompt, rewards=(part,), turns=(turn,), earlier=earlier)
    write_trajectories(path, 1, [*step[:-1], last])
    metadata = pq.read_metadata(path)
    assert [metadata.row_group(i).num_rows for i in range(2)] == [512, 1]
    table = pq.read_table(path)
    assert table["reward_late"].to_pylist() == [None] * 512 + [0.25]
    assert table["environment"].to_pylist() == [""] * 512 + ["tool"]
    assert table["reference_value"].to_pylist() == [None] * 512 + ["7"]
    read = read_trajectories(path)
    assert list(map(plain, read)) == list(map(plain, [*step[:-1], last]))
    assert [t.strides for t in (read[0].loss_mask, read[0].weight_versions)] == [(0,), (0,)]


def test_a_response_crosses_processes_in_8_bytes_a_token_and_its_text() -> None:
    whole = trajectory(7, 0, [*range(20_000)])
    assert len(pickle.dumps(whole)) < 20_000 * 8 + 2_000
    assert plain(copy(whole)) == plain(whole)  # by the same form


def test_masks_and_versions_cross_as_runs() -> None:
    values, lengths = to_runs(np.array([1, 1, 1, 2], np.int32))
    assert (values.tolist(), lengths.tolist()) == ([1, 2], [3, 1])
    mask, versions = np.array([True, False, False, True]), np.array([3, 0, 0, 4], np.int32)
    parts = replace(trajectory(7, 0, [1, 2, 3, 4]), loss_mask=mask)
    parts = parts.add_columns({WEIGHT_VERSIONS: versions, VALUES: floats(0.0, -0.0, 1, 1)})
    for one in (parts, trajectory(7, 0, []), trajectory(7, 0, [1])):
        assert plain(copy(one)) == plain(one)
    assert parts.learned(versions).tolist() == [3, 4]
    assert parts.spread(floats(1, 2)).tolist() == [1, 0, 0, 2]
    single = trajectory(7, 0, [1, 2])
    assert single.learned(single.sampler_logprobs) is single.sampler_logprobs


def test_columns_must_fit_their_tokens() -> None:
    with pytest.raises(AssertionError):
        trajectory(7, 0, [11, 12]).add_columns({ADVANTAGES: floats(0)})


numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Any, of any number of turns."""
    length = draw(st.integers(0, 4))

    def per_token(strategy: st.SearchStrategy[Any], dtype: type) -> np.ndarray[Any, Any]:
        return np.array(draw(st.lists(strategy, min_size=length, max_size=length)), dtype)

    ids = st.integers(0, 2**31 - 1)
    prompt = Prompt(
        draw(st.integers(0, 2**40)),
        np.array(draw(st.lists(ids, max_size=4)), np.int32),
        draw(texts),
        draw(st.none() | texts),
        draw(texts),
        draw(st.dictionaries(texts, values, max_size=2)),
    )
    names = draw(st.lists(texts, max_size=3, unique=True))
    return Trajectory(
        prompt=prompt,
        group=draw(st.integers(0, 9)),
        sample_index=draw(st.integers(0, 9)),
        response_tokens=per_token(ids, np.int32),
        loss_mask=per_token(st.booleans(), np.bool_),
        columns={
            SAMPLER_LOGPROBS: per_token(st.floats(-50, 0, width=32), np.float32),
            WEIGHT_VERSIONS: per_token(st.integers(0, 2**31 - 1), np.int32),
        },
        response_text=draw(texts),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        rewards=tuple(RewardPart(name, draw(numbers), draw(numbers)) for name in names),
    )


def plain(record: Trajectory) -> tuple[Any, ...]:
    """To compare; arrays with their types."""
    arrays = (
        record.prompt.tokens,
        record.response_tokens,
        record.loss_mask,
        *record.columns.values(),
    )
    none = np.zeros(0, np.int64)
    rest = replace(
        record,
        prompt=replace(record.prompt, tokens=none),
        response_tokens=none,
        loss_mask=none.astype(np.bool_),
        columns={},
    )
    return repr(rest), [*record.columns], [(array.dtype, array.tolist()) for array in arrays]


@settings(max_examples=percent(60))
@given(step=st.lists(trajectories(), max_size=4))
def test_trajectories_read_back_as_they_were_written(
    step: list[Trajectory], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.parquet"
    write_trajectories(path, 1, step)
    assert list(map(plain, read_trajectories(path))) == list(map(plain, step))


def test_branches_are_kept_within_their_episode(tmp_path: Path) -> None:
    turns = (Turn("assistant", 0, 1, "a", 0.5), Turn("tool", 1, 2, "b", 0.0, "c"))
    first = replace(
        trajectory(0, 1, [11, 12]).add_columns({TOKEN_REWARDS: floats(1, 1)}),
        rewards=(),
        turns=turns,
    )
    last = replace(trajectory(0, 1, [13]), earlier=(first, replace(first, response_text="d")))
    step, numbers = [trajectory(0, 0, [14]), last], iter(range(4))

    def score(branch: Trajectory) -> Trajectory:
        count = len(branch.response_tokens)
        return branch.add_columns({ADVANTAGES: np.full(count, next(numbers), np.float32)})

    write_trajectories(tmp_path / "a", 1, [t.change_branches(score) for t in step])
    read = read_trajectories(tmp_path / "a")
    assert [len(t.earlier) for t in read] == [0, 2]
    for t, other in zip(step, read, strict=True):
        assert list(map(plain, t.earlier)) == list(map(plain, other.earlier))
        bare, same = replace(t, earlier=()), replace(other, earlier=())
        assert plain(bare) == plain(same)
    rows = pq.read_table(tmp_path / "a", columns=["advantages", "earlier"]).to_pylist()
    assert [row["advantages"] for row in rows] == [[0.0], [3.0]]
    assert [one["advantages"] for one in rows[1]["earlier"]] == [[1.0, 1.0], [2.0, 2.0]]
    shown = read_responses(tmp_path / "a")[1].response.splitlines()
    assert [line for line in shown if line.startswith("[branch")] == [
        f"[branch {i} of 3]" for i in (1, 2, 3)
    ]
    assert "[assistant, reward 0.5] a" in shown and "[tool] b (wrong: c)" in shown


def of_before(path: Path) -> None:
    """A file as it was before groups, masks and advantages of tokens were kept."""
    rows: dict[str, list[Any]] = {
        "step": [1, 1, 1],
        "prompt_index": [7, 7, 9],
        "sample_index": [0, 1, 0],
        "prompt": ["a", "a", "b"],
        "response": ["x", "y", "z"],
        "reference": [None, None, "2"],
        "reward": [0.0, 1.0, 0.5],
        "reward_right": [0.0, 1.0, 0.5],
        "advantage_mean": [0.25, None, -1.0],
        "finish_reason": ["stop", "length", "stop"],
        "weight_version": [3, None, 3],
        "tokens": [[11, 12], [], [13]],
        "sampler_logprobs": [[-0.5, -0.5], [], [-0.5]],
    }
    pq.write_table(pa.table(rows), path)


def test_files_of_before_are_read_by_people_and_refused_for_training(tmp_path: Path) -> None:
    path = tmp_path / "step.parquet"
    of_before(path)
    first, second = read_groups(path)
    assert [one.response for one in first.responses] == ["y", "x"]
    assert (first.number, first.prompt, first.reward, first.spread) == (7, "a", 0.5, 1.0)
    assert second.responses == [
        SampledResponse(
            *(9, 9, 0, "", "b", "z", "2", 0.5), {"right": 0.5}, -1.0, 1, 3, cut_off=False
        )
    ]
    with pytest.raises(ConfigError, match="group, loss_mask, parts"):
        read_trajectories(path)


def test_groups_of_a_prompt_that_comes_twice_stay_apart(tmp_path: Path) -> None:
    path = tmp_path / "step.parquet"
    step = [replace(trajectory(7, i % 2, [1]), group=i // 2) for i in range(4)]
    write_trajectories(path, 1, step)
    assert [(g.number, len(g.responses), g.prompt) for g in read_groups(path)] == [
        (0, 2, "What is 7?"),
        (1, 2, "What is 7?"),
    ]


@pytest.mark.parametrize(
    ("count", "shown"), [(1, [9.0]), (3, [9.0, 5.0, 0.0]), (5, [9.0, 7.0, 5.0, 2.0, 0.0])]
)
def test_some_responses_are_the_best_the_worst_and_some_between(
    tmp_path: Path, count: int, shown: list[float]
) -> None:
    run = RunDirectory(tmp_path)
    rewards = [4, 0, 9, 7, 1, 8, 2, 3, 6, 5]
    given = [
        replace(
            trajectory(place, 0, [1]),
            rewards=(RewardPart("right", reward, 0.5), RewardPart("form", reward / 2, 1.0)),
            finish_reason="length" if reward == 0 else "stop",
        )
        for place, reward in enumerate(rewards)
    ]
    write_trajectories(run.trajectories_path(3), 3, given[:1])
    write_trajectories(run.trajectories_path(12), 12, given)
    latest = max(run.trajectories().items(), default=None)
    assert latest == (12, run.trajectories_path(12))
    found = read_some(latest[1], count)
    assert [one.reward for one in found] == shown
    assert (found[0].prompt, found[0].parts) == ("What is 2?", {"right": 9.0, "form": 4.5})
    assert [one.cut_off for one in found] == [one.reward == 0 for one in found]


def test_each_of_few_responses_is_shown_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert max(run.trajectories().items(), default=None) is None
    for count in (1, 2):
        path = run.trajectories_path(count)
        write_trajectories(path, count, [trajectory(i, 0, [1]) for i in range(count)])
        assert [one.reference for one in read_some(path, 5)] == [str(i) for i in range(count)]
        assert len(read_responses(path)) == count


def test_log_probs_are_stored_without_a_dictionary_and_exactly(tmp_path: Path) -> None:
    rng, logprobs = np.random.default_rng(0), []
    step = []
    for sample in range(4):
        logprobs.append(-rng.exponential(1, 5000).astype(np.float32))
        one = trajectory(0, sample, [7] * 5000)
        step.append(replace(one, columns={**one.columns, SAMPLER_LOGPROBS: logprobs[-1]}))
    write_trajectories(tmp_path / "a", 1, step)
    row_group = pq.read_metadata(tmp_path / "a").row_group(0)
    columns = [row_group.column(place) for place in range(row_group.num_columns)]
    [stored] = [c for c in columns if c.path_in_schema == "sampler_logprobs.list.element"]
    assert "BYTE_STREAM_SPLIT" in stored.encodings and not stored.has_dictionary_page
    assert stored.total_compressed_size < 4 * 20_000
    for one, expected in zip(read_trajectories(tmp_path / "a"), logprobs, strict=True):
        assert np.array_equal(one.columns[SAMPLER_LOGPROBS], expected)


def test_a_group_is_found_in_its_row_groups(tmp_path: Path) -> None:
    step = [replace(trajectory(n, 0, [1]), group=n // 2) for n in range(1030)]
    write_trajectories(tmp_path / "a", 1, step)
    assert row_groups_of(tmp_path / "a", "group", 3) == [0]
    assert row_groups_of(tmp_path / "a", "group", 256) == [1]
    assert row_groups_of(tmp_path / "a", "group", 514) == [2]
    assert row_groups_of(tmp_path / "a", "group", 515) == []
    assert row_groups_of(tmp_path / "a", "turns", 515) == [0, 1, 2], "no column of numbers"
    [batch] = iter_bounded(tmp_path / "a", ["group"], [2])
    assert batch["group"].to_pylist() == [512, 512, 513, 513, 514, 514]
