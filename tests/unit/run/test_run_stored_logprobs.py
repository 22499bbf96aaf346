"""Stored log-probs come back bit for bit, and nothing else is taken for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.errors import ConfigError
from plimsoll.records import Sample
from plimsoll.run.stored_logprobs import (
    LogprobStore,
    StoredLogprobs,
    read_logprobs,
    sequence_key,
    write_logprobs,
)


def sample(*tokens: int, loss_mask: tuple[int, ...] = (1,)) -> Sample:
    return Sample(np.array(tokens), np.isin(np.arange(len(tokens)), loss_mask))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stored") / "new" / "logprobs.parquet"


@settings(max_examples=percent(20))  # each writes to the disk
@given(values=st.lists(st.floats(-1e6, 0, width=32), max_size=5))
def test_numbers_come_back_bit_for_bit(values: list[float], path: Path) -> None:
    numbers = {sequence_key(sample(0, i)): value for i, value in enumerate(values)}
    write_logprobs(path, StoredLogprobs("of a model", numbers))
    found = read_logprobs(path)
    assert found == StoredLogprobs("of a model", numbers)
    kept = np.array(list(found.logprobs.values()), dtype=np.float32)
    assert kept.tobytes() == np.array(values, dtype=np.float32).tobytes()


def test_a_key_is_of_the_tokens_and_of_what_is_learned() -> None:
    one = sample(5, 6, 7)
    others = [sample(5, 6), sample(6, 5, 7), sample(5, 6, 7, loss_mask=(2,)), sample(5, 6, 7, 0)]
    assert sequence_key(one) == sequence_key(sample(5, 6, 7))
    assert len({sequence_key(each) for each in (one, *others)}) == 5
    assert sequence_key(Sample(one.tokens.astype(np.int32), one.loss_mask)) == sequence_key(one)


def test_what_is_added_is_in_the_file_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill leaves is all but the last seconds' work."""
    file = tmp_path / "logprobs.parquet"
    numbers = {sequence_key(sample(0, i)): -0.5 * i for i in range(4)}
    first, second, third, last = ({key: value} for key, value in numbers.items())
    with LogprobStore(file, StoredLogprobs("of a model", first)) as store:
        store.add(second)
        assert not file.exists()
        monkeypatch.setattr("plimsoll.run.stored_logprobs.WRITE_SECONDS", 0.0)
        store.add(third)
        assert read_logprobs(file) == StoredLogprobs("of a model", first | second | third)
        store.add(last)
    assert read_logprobs(file) == StoredLogprobs("of a model", numbers)


def test_an_error_keeps_what_was_added_and_nothing_added_leaves_no_file(tmp_path: Path) -> None:
    kept, none = tmp_path / "kept.parquet", tmp_path / "none.parquet"
    numbers = {sequence_key(sample(0, 1)): -1.0}
    for file, added in ((kept, numbers), (none, {})):
        with (
            pytest.raises(KeyboardInterrupt),
            LogprobStore(file, StoredLogprobs("of a model", {})) as store,
        ):
            store.add(added)
            raise KeyboardInterrupt
    assert read_logprobs(kept).logprobs == numbers and not none.exists()


@pytest.mark.parametrize("content", ["no Parquet", "another table"])
def test_another_file_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    if content == "another table":
        pq.write_table(pa.table({"logprob": [1.0]}), file)
    else:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"rows\.parquet holds no log-probs"):
        read_logprobs(file)
