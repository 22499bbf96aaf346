"""benchmarks/memory_accuracy.py and its table: every row plans, as near as the docs say."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from memory_accuracy import COLUMNS, LIVES, PEAKS, Row, line, read_rows

NUMBERS = (
    *("cards", "zero_stage", "sequences", "seq_len", "trained", "adapter_rank", "adapter_bytes"),
    *("head_chunk", "measured_gb", "bucket", "prefetch", "activation_bytes", "logit_bytes"),
    *("output_bytes", "token_bytes", "checkpoint_bytes", "layers_at_reduce"),
    *(f"{life}_gb" for life in LIVES),
)
WORDS: Mapping[str, set[str]] = {
    "method": {"single", "ddp", "fsdp", "deepspeed", "colossal"},
    "dtype": {"mixed", "pure 16-bit", "fp32", "fp32 weights"},
    "quantization": {"", "nf4", "nf4 twice", "gptq", "gptq 8", "int8"},
    "checkpointing": {"", "full", "selective"},
    "attention": {"", "eager"},
    "metric": {"allocated", "reserved", "device", "unstated"},
    "confidence": {"high", "low"},
    "lengths": {"", "vary"},
    "adapter_dropout": {"", "yes"},
    "tied": {"", "no"},
    "checkpoints": {"", "until the end"},
    "gradients": {"", "dropped", "late"},
}
TEXTS = {"id", "source", "url", "model", "card", "offload", "adapter_targets"}
# Llama-3.1-8B: all weights trained in fp32 on one token, so that activations hardly weigh.
LLAMA = {
    "id": "mine-1",
    "source": "me",
    "model": "meta-llama/Llama-3.1-8B",
    "card": "H100-80GB",
    "cards": "1",
    "sequences": "1",
    "seq_len": "1",
    "measured_gb": "100",
    "metric": "allocated",
}
PARAMETERS = 8_030_261_248


@cache
def table() -> tuple[Row, ...]:
    return tuple(read_rows(PEAKS))


def run(*arguments: str, code: int = 0) -> str:
    command = [sys.executable, str(PEAKS.with_name("memory_accuracy.py")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def written(folder: Path, *rows: dict[str, str]) -> str:
    file = folder / "mine.csv"
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, sorted({name for row in rows for name in row}))
        writer.writeheader()
        writer.writerows(rows)
    return str(file)


def test_every_cell_is_a_number_or_a_known_word() -> None:
    ids = [row["id"] for row in table()]
    assert len(ids) == len(set(ids)) == 777
    for row in table():
        assert row.columns.keys() == {*TEXTS, *NUMBERS, *WORDS}
        assert all(row[name] for name in COLUMNS if name != "measured_gb"), row["id"]
        for name in NUMBERS:
            assert re.fullmatch(r"|-?\d+(\.\d+)?", row[name]), (row["id"], name)
        for name, words in WORDS.items():
            assert row[name] in words, (row["id"], name)
        assert (row["method"] in ("deepspeed", "colossal")) == bool(row["zero_stage"])
        assert set(row["offload"].split()) <= {"optimizer", "weights", "activations"}
        assert row["url"].startswith("https://") or not row["url"]


def test_every_column_is_explained() -> None:
    explained = PEAKS.with_name("README.md").read_text()
    for name in (*TEXTS, *NUMBERS, *WORDS):
        assert re.search(rf"^\|[^|]*\b{name}\b[^|]*\|", explained, re.MULTILINE), name


def test_every_row_is_planned_between_its_weights_and_a_terabyte() -> None:
    for row in table():
        assert 1e9 * row.number("always_gb") <= row.allocated < row.device < 1e12, row["id"]


def test_states_in_the_table_are_the_sum_of_their_widths() -> None:
    """AdamW of all weights: fp32 weights and moments all the time, and fp32 gradients."""
    whole = [row for row in table() if row["dtype"] == "mixed" and row["method"] == "single"]
    divided = [row for row in table() if row["dtype"] == "fp32 weights" and row["method"] == "fsdp"]
    held = {
        row["id"]: (
            row.number("always_gb") * 1e9 * row.count("cards") / row.shape.parameters,
            row.number("training_gb") * 1e9 * row.count("cards") / row.shape.parameters,
        )
        for row in (*whole, *divided)
        if not row["trained"]
    }
    plain = [one for one in held.values() if one == pytest.approx((12, 4), rel=1e-3)]
    assert len(plain) >= 60
    assert held["spark-001"] in plain


@pytest.mark.parametrize(
    ("source", "metric", "median", "worst"),
    [
        ("PrimeIntellect-ai/prime-rl", "reserved", "2.7%", "-5.1%"),
        ("QwenLM/Qwen", "unstated", "4.1%", "-8.9%"),
        ("foundation-model-stack/fms-acceleration", "allocated", "1.7%", "-14.0%"),
        ("modelscope/ms-swift", "reserved", "18.0%", "-53.3%"),
        ("AgileRL/AgileRL", "device", "3.5%", "-3.7%"),
    ],
)
def test_errors_on_the_largest_sources_are_as_recorded(
    source: str, metric: str, median: str, worst: str
) -> None:
    rows = [row for row in table() if (row["source"], row["metric"]) == (source, metric)]
    assert line([row for row in rows if row["confidence"] == "high"]).split()[1:3] == [
        median,
        worst,
    ]


def test_errors_on_all_trusted_rows_are_those_in_the_docs() -> None:
    numbers = line([row for row in table() if row["confidence"] == "high"]).split()
    assert numbers == ["681", "3.6%", "-53.3%", "90.8%", "19", "2"]
    page = (PEAKS.parents[1] / "docs" / "performance.md").read_text()
    assert "median error 3.6 %" in page


def test_zero_stage_3_divides_states_by_the_ranks() -> None:
    """16-bit weights and gradients, masters and moments in fp32."""
    eight, sixteen = (
        Row({**LLAMA, "method": "deepspeed", "zero_stage": "3", "cards": cards}).states["always"]
        for cards in ("8", "16")
    )
    assert eight - sixteen == pytest.approx(16 * PARAMETERS / 16, rel=0.01)


def test_a_table_of_the_user_is_compared(tmp_path: Path) -> None:
    states = {"always_gb": str(12 * PARAMETERS / 1e9), "training_gb": str(4 * PARAMETERS / 1e9)}
    ran_out = {**LLAMA, **states, "id": "mine-2", "measured_gb": "", "card": "A100-40GB"}
    text = run(written(tmp_path, {**LLAMA, **states}, ran_out), "--rows")
    cells = {row[0]: row[1:] for line in text.splitlines() if (row := re.split(r"  +", line))}
    assert cells["mine-1"] == ["100", "129.5 GB", "+29.5%", "allocated"]
    assert cells["mine-2"] == ["ran out", "137.3 GB", "allocated"]
    assert cells["me: allocated"] == ["2", "29.5%", "0.0%", "29.5%", "1", "0"]


def test_a_run_that_ran_out_and_is_predicted_to_fit_is_missed() -> None:
    assert line([Row({**LLAMA, "measured_gb": ""})]).split() == ["1", "0", "1"]


def test_unreadable_tables_are_refused(tmp_path: Path) -> None:
    assert "absent.csv" in run(str(tmp_path / "absent.csv"), code=2)
    assert "no column" in run(written(tmp_path, {"id": "1", "source": "me"}), code=2)
    unknown = written(tmp_path, {**LLAMA, "model": "nobody/none"})
    assert "nobody/none" in run(unknown, code=2)
