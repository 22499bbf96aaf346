"""A whole run on a mixture of plain text, columns and messages with NEFTune, gone on with where it
was cut off: what it leaves equals a run that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import SFT, cut_off, metrics, run_here, write_config, write_task

from plimsoll.run.state import RunState

TURNS = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": " 2"},
]
MIXTURE: dict[str, Any] = SFT | {
    "run": {"directory": "whole", "steps": 6, "save_every": 2, "eval_every": 3}
    | {"keep_checkpoints": 9, "tensorboard": False},
    "data": SFT["data"]
    | {
        "train": {
            "sums": {"path": "rows.jsonl", "prompt": "prompt", "response": "response", "weight": 2},
            "talk": {"path": "talk.jsonl", "messages": "turns"},
            "book": {"path": "book.jsonl", "text": "body"},
        },
        "max_tokens": 12,
        "on_bad_row": "skip",
    },
    "algorithm": {"neftune_alpha": 5, "learned_tokens": "all"},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a book: its first page gives 2 samples of at most 12 tokens, the last page
    1."""
    home = tmp_path_factory.mktemp("mixture")
    write_task(home)
    (home / "talk.jsonl").write_text(json.dumps({"turns": TURNS}) + "\n")
    pages = [{"body": "0123456789 #### "}, {"page": 2}, {"body": "1+2=3"}]
    (home / "book.jsonl").write_text("".join(json.dumps(page) + "\n" for page in pages))
    write_config(home, "sft", MIXTURE)
    return home


def test_a_mixture_with_noise_resumes_bit_for_bit(home: Path) -> None:
    whole = run_here(home, "sft", "sft.yaml")
    assert whole.code == 0, whole.err
    cut_off(home / "whole", home / "again", 2)
    resumed = run_here(home, "sft", "sft.yaml", "--run.directory=again", "--run.resume=must")
    assert resumed.code == 0, resumed.err

    rows = metrics(home / "whole")
    assert metrics(home / "again") == rows
    model = "model/model.safetensors"
    assert (home / "again" / model).read_bytes() == (home / "whole" / model).read_bytes()

    check_epochs(rows)
    check_bad_rows(home / "whole" / "bad_rows.jsonl", home)
    state = RunState.load(home / "again" / "checkpoints" / "step-000006" / "state.json")
    assert (state.data_position, state.data_rows) == (6 * 7, 3 + 16 + 1)


def test_a_mixture_with_streams_resumes_bit_for_bit(home: Path) -> None:
    """Documents and skipped rows are among them; 11 draws of the book's 3 pieces are 4 blocks."""
    streams = ["--data.train.book.streaming", "true", "--data.train.sums.streaming", "true"]
    whole = run_here(home, "sft", "sft.yaml", "--run.directory=streamed", *streams)
    assert whole.code == 0, whole.err
    assert (home / "streamed" / "streams.jsonl").read_text().count('"data.train.book"') == 4
    for name in ("with counts", "without"):
        cut_off(home / "streamed", home / name, 2)
        if name == "without":
            (home / name / "streams.jsonl").unlink()
        more = ["--run.directory", name, "--run.resume=must", *streams]
        resumed = run_here(home, "sft", "sft.yaml", *more)
        assert resumed.code == 0, resumed.err
        assert metrics(home / name) == metrics(home / "streamed")
        model = "model/model.safetensors"
        assert (home / name / model).read_bytes() == (home / "streamed" / model).read_bytes()
    assert "epoch/book" not in metrics(home / "streamed")[-1]
    check_bad_rows(home / "streamed" / "bad_rows.jsonl", home)


def check_epochs(rows: list[dict[str, Any]]) -> None:
    """42 rows of weights 1 : 2 : 1 are 11, 21 and 10 (`book` is written first, and so drawn first);
    of 3 samples, of 16 rows, and of 1."""
    last = rows[-1]
    epochs = (last["epoch/book"], last["epoch/sums"], last["epoch/talk"])
    assert epochs == pytest.approx((11 / 3, 21 / 16, 10 / 1))
    assert "epoch" not in last


def check_bad_rows(path: Path, home: Path) -> None:
    [bad] = [json.loads(line) for line in path.read_text().splitlines()]
    assert (bad["file"], bad["line"], bad["field"]) == ("book.jsonl", 2, "body")
    assert (home / bad["file"]).is_file()
