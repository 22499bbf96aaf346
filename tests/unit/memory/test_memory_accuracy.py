"""benchmarks/memory_accuracy.py, run as its users run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "memory_accuracy.py"
COLUMNS = (
    "id,source,task,model,params_b,gpu,n_gpus,strategy,offload,peft,dtype,micro_batch,seq_len,"
    "grad_ckpt,flash_attn,optimizer,reported_peak_gb_per_gpu,notes,confidence"
)
# 8,030,261,248 parameters; one token, so that activations hardly weigh.
LLAMA = "meta-llama/Llama-3.1-8B"
PARAMETERS = 8_030_261_248
EMBEDDING = 128_256 * 4096
PLAIN = {
    "id": "a-1",
    "source": "someone/else@123:README",
    "task": "sft",
    "model": LLAMA,
    "params_b": "8.03",
    "gpu": "H100-80",
    "n_gpus": "1",
    "strategy": "single",
    "offload": "none",
    "peft": "none",
    "dtype": "fp32",
    "micro_batch": "1",
    "seq_len": "1",
    "grad_ckpt": "full",
    "flash_attn": "FA2",
    "optimizer": "AdamW (fused)",
    "reported_peak_gb_per_gpu": "100",
    "notes": "GB; max_memory_allocated",
    "confidence": "high",
}


def run(tmp_path: Path, *rows: dict[str, str], every: bool = True) -> str:
    file = tmp_path / "peaks.csv"
    names = COLUMNS.split(",")
    lines = [",".join(f'"{(PLAIN | row)[name]}"' for name in names) for row in rows]
    file.write_text("\n".join([COLUMNS, *lines]) + "\n")
    return output(str(file), *(["--rows"] if every else []))


def output(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def predicted(text: str, row: str = "a-1") -> float:
    """GB."""
    found = re.search(rf"^{row} +\S+ +([\d.]+)", text, re.MULTILINE)
    assert found, text
    return float(found[1])


STATES = (
    ({"dtype": "fp32"}, 16),
    ({"dtype": "fp32", "optimizer": "AdamW"}, 20),  # foreach: the roots of the moments
    ({"dtype": "pure bf16"}, 8),
    ({"dtype": "pure bf16", "optimizer": "SGD"}, 4),
    ({"dtype": "pure bf16", "optimizer": "8-bit AdamW"}, 6),
    ({"dtype": "pure bf16", "optimizer": "PagedAdamW8bit"}, 4),
    ({"dtype": "bf16 amp"}, 18),
    ({"dtype": "bf16", "optimizer": "Lion fused"}, 14),
)


def test_states_of_a_whole_copy(tmp_path: Path) -> None:
    text = run(tmp_path, *(row | {"id": f"a-{i}"} for i, (row, _) in enumerate(STATES)))
    for i, (row, each) in enumerate(STATES):
        # The largest tensor may be in flight besides.
        least, most = each * PARAMETERS / 1e9, (each * PARAMETERS + 8 * EMBEDDING) / 1e9
        assert least - 0.1 < predicted(text, f"a-{i}") < most + 0.1, row


def test_sharding_divides_by_the_ranks(tmp_path: Path) -> None:
    one, eight = (
        run(tmp_path, {"strategy": "fsdp2", "n_gpus": n, "gpu": "B200"}) for n in ("1", "8")
    )
    assert predicted(one) - predicted(eight) > 16 * PARAMETERS * 7 / 8e9 - 5


def test_gib_and_gb_are_told_apart(tmp_path: Path) -> None:
    rows = ({"id": "a-1"}, {"id": "a-2", "notes": "GiB, max_memory_allocated"})
    text = run(tmp_path, *rows)
    assert re.search(r"^a-1 +100\.0 ", text, re.MULTILINE)
    assert re.search(r"^a-2 +107\.4 ", text, re.MULTILINE)


UNKNOWN = (
    ("model", "nobody/nothing-7b"),
    ("n_gpus", "some"),
    ("strategy", "tensor parallel"),
    ("offload", "nvme"),
    ("offload", "optimizer"),  # but the strategy is a single GPU
    ("peft", "prefix tuning"),
    ("peft", "lora"),  # of what rank?
    ("dtype", "fp8"),
    ("micro_batch", ""),
    ("seq_len", "long"),
    ("grad_ckpt", "selective"),
    ("flash_attn", "perhaps"),
    ("optimizer", "Muon"),
    ("reported_peak_gb_per_gpu", "plenty"),
    ("task", "ppo"),
)


def test_unknown_values_are_listed_and_never_guessed(tmp_path: Path) -> None:
    rows = [{"id": f"a-{i}", column: value} for i, (column, value) in enumerate(UNKNOWN)]
    text = run(tmp_path, *rows, {"id": "b-1"}).lower()
    for i, (column, value) in enumerate(UNKNOWN):
        assert f"  a-{i}: {column} = {value.lower()!r}" in text
    assert not re.search(r"^a-", text, re.MULTILINE)
    assert re.search(r"^b-1 ", text, re.MULTILINE)


def test_false_refusals_and_missed_ooms_are_counted(tmp_path: Path) -> None:
    ran = {"notes": "GB; nvidia-smi"}  # 128 GB of states on an H100
    small = {"model": "Qwen/Qwen2.5-0.5B", "reported_peak_gb_per_gpu": "OOM"} | ran
    text = run(tmp_path, {"id": "a-1"} | ran, {"id": "a-2"} | small, every=False)
    line = next(line for line in text.splitlines() if line.startswith("  Plimsoll"))
    assert line.split()[-2:] == ["1", "1"]


def test_a_model_is_known_without_its_organisation(tmp_path: Path) -> None:
    names = ("Llama-3.1-8B", "llama 3.1 8b", "meta-llama/Llama-3.1-8B")
    text = run(tmp_path, *({"id": f"a-{i}", "model": n} for i, n in enumerate(names)))
    assert predicted(text, "a-0") == predicted(text, "a-1") == predicted(text, "a-2")


def test_an_unknown_card_leaves_the_prediction(tmp_path: Path) -> None:
    text = run(tmp_path, {"id": "a-1", "gpu": "Abacus"}, {"id": "a-2"})
    assert "['Abacus']" in text
    assert predicted(text, "a-1") == predicted(text, "a-2")


def test_no_file_and_no_columns(tmp_path: Path) -> None:
    assert "absent.csv" in output(str(tmp_path / "absent.csv"), code=2)
    bare = tmp_path / "bare.csv"
    bare.write_text("id,source\n1,2\n")
    assert "has no column" in output(str(bare), code=2)


def test_the_published_rows_are_within_the_aim() -> None:
    data = os.environ.get("PLIMSOLL_DATA")
    file = Path(data or "none") / "memory" / "published_peaks.csv"
    if not file.exists():
        pytest.skip("needs memory/published_peaks.csv in PLIMSOLL_DATA")
    lines = output(str(file)).splitlines()
    trusted = [
        below.split()
        for title, below in pairwise(lines)
        if re.match(r"\S+: (reserved|unstated)$", title)
    ]
    assert len(trusted) == 2
    for numbers in trusted:
        median, worst = (float(text.rstrip("%")) for text in numbers[2:4])
        assert median <= 5
        assert worst >= -9
