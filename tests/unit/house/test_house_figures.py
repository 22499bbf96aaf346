"""The documents' tables of plans are those of today."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
from collections import defaultdict
from pathlib import Path

import pytest

from plimsoll.cli import main

ROOT = Path(__file__).parents[3]
DOCUMENTS = ROOT / "docs"


def test_the_tables_of_levers_are_what_their_script_prints() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(ROOT / "benchmarks" / "levers.py"), run_name="__main__")
    text = (DOCUMENTS / "levers.md").read_text()
    assert [table for table in printed.getvalue().split("\n\n") if table not in text] == []


WAYS = {
    "`reference.zero.stage: 0`: a copy on every card": ["--reference.zero.stage", "0"],
    "`reference.zero.stage: 3`": [],
    "`reference.zero.offload: cpu`, a copy for each card": [
        *("--reference.zero.stage", "0", "--reference.zero.offload", "cpu")
    ],
    "`reference.zero.stage: 3`, `reference_logprobs.precompute: true`": [
        *("--reference_logprobs.precompute", "true")
    ],
}
PHASES = ("precompute", "load", "score", "train_actor")


@pytest.mark.parametrize("way", WAYS)
def test_what_a_reference_takes_is_what_the_plan_says(way: str, tmp_path: Path) -> None:
    text = (DOCUMENTS / "dpo.md").read_text()
    config = re.search(r"# dpo: dpo-7b.yaml\n.*?(?=```)", text, re.DOTALL)
    assert config is not None
    file = tmp_path / "dpo-7b.yaml"
    file.write_text(config[0])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["plan", str(file), "--host-memory", "1TB", "--json", *WAYS[way]]) == 0
    plan = json.loads(printed.getvalue())
    sizes: dict[str, int] = defaultdict(int)
    for item in plan["items"]:
        if item["device"] == "node 0, cards 0-7":
            sizes[item["phase"]] += item["bytes"]
    card = [f" {sizes[phase] / 1e9:.3g} " if sizes[phase] else " " for phase in PHASES]
    host = f" {plan['hosts'][0]['peak']['bytes'] / 1e9:.3g} "
    assert f"| {way} |{'|'.join([*card, host])}|" in text
