"""Predicted against published peaks of GPU memory, row by row and by source.

    python benchmarks/memory_accuracy.py [CSV ...] [--rows]

Files default to $PLIMSOLL_DATA/memory/published_peaks.csv; beside this one, peaks_of_others.csv has
rows of other projects. Each row is modelled as the framework that it was measured with, and
compared in its own metric. Values that are not known are listed and their rows left out, and so is
what was read into a value that is silent or may be read in several ways. Exit code 2: no such file,
or a file without the columns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from peak_models import allocated_bytes, in_metric
from peak_others import closed_form, deepspeed_estimate
from peak_rows import Row, Unknown, read_rows
from plimsoll.errors import ConfigError
from plimsoll.memory.contents.overheads import MIB, Constants

Estimator = Callable[[Row], float]
TUNED_ON = ("QwenLM/Qwen", "PrimeIntellect-ai/prime-rl")
LOOKED_AT = (
    *(
        "AnswerDotAI/fsdp_qlora",
        "Lightning-AI/litgpt",
        "huggingface/peft",
        "meta-pytorch/torchtune",
    ),
    *("modelscope/ms-swift", "pytorch/torchtitan", "foundation-model-stack/fms-acceleration"),
    *("gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a", "Anassbzdd/fitcheck"),
    *("whitecircle/halo", "ljm565/universal-llm-trainer", "ethanyanjiali/Mai", "pytorch/ao"),
    *("intelligent-machine-learning/dlrover", "hiyouga/LLaMA-Factory", "meta-llama/llama-cookbook"),
    *("dvlab-research/LongLoRA", "axolotl-ai-cloud/axolotl", "unslothai/unsloth"),
    *("superkaiba/explore-persona-space", "FelipeMAffonso/research-neutrality-cost"),
    *("rsoumyadeep/AlignLab-posttraining", "AgileRL/AgileRL", "gpjt/fine-tune-2024-04"),
    *("philschmid/deep-learning-pytorch-huggingface", "usamec/lowmem_finetuning"),
    *("ai-learner-1429/peft-examples", "ellisbrown/BDML25SP", "llama-recipes-on-3090"),
    *("hub.docker.com/u/thecloudgarage", "Lightning-AI/lightning-thunder", "huggingface/trl"),
    *("StochasticResult/DL_SLM_Gemma2b_LoRA_Fine-Tuning", "Pomilon/LEMA", "OpenRLHF/OpenRLHF"),
    *("GoogleCloudPlatform/vertex-ai-samples", "jiaweizzhao/GaLore", "NVIDIA-NeMo/Automodel"),
    *("bharathbattu/LoRA-vs-Full-Fine-Tuning", "YuchenHe985/llm-finetune-lab"),
    *("qwen3-8b-operation-manual", "Jack31098/llm_training_demo", "hpcaitech/ColossalAI"),
    *("magazine.sebastianraschka.com", "princeton-nlp/SimPO", "pytorch.org/blog/finetune-llms"),
    *("teaching-on-testbeds/llm-chi", "jsboige/CoursIA", "hanasobi/self-hosted-llms-tutorial"),
    "allenai/open-instruct",
)
"""Sources whose rows were looked at after a first prediction, which docs/performance.md keeps."""
GAPS = tuple(n / 100 for n in range(2, 13))
CONTEXTS = tuple(n * 64 * MIB for n in range(8, 29))  # 0.5 to 1.75 GiB


@dataclass(frozen=True)
class Measured:
    """A row with its allocated bytes as predicted, which no constant changes."""

    row: Row
    allocated: int

    def error(self, constants: Constants) -> float:
        """Of the prediction, as a share of the peak; below 0 is too low."""
        assert self.row.peak is not None
        return in_metric(self.row, self.allocated, constants).metric / self.row.peak - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="CSV")
    parser.add_argument("--rows", action="store_true", help="list every row")
    arguments = parser.parse_args()
    try:
        found = [row for file in arguments.files or default_files() for row in read_rows(file)]
    except (OSError, ConfigError) as error:
        print(f"memory_accuracy: {error}", file=sys.stderr)
        return 2
    report(found, every_row=arguments.rows)
    return 0


def default_files() -> list[Path]:
    """The published peaks beside the other test data."""
    if data := os.environ.get("PLIMSOLL_DATA"):
        return [Path(data) / "memory" / "published_peaks.csv"]
    raise ConfigError("no CSV was given, and PLIMSOLL_DATA is not set")


def report(found: Sequence[Row | Unknown], every_row: bool) -> None:
    unknown = [one for one in found if isinstance(one, Unknown)]
    rows = [Measured(one, allocated_bytes(one)) for one in found if isinstance(one, Row)]
    if every_row:
        print_rows(rows)
    if unknown:
        print(f"{len(unknown)} rows left out, for a value that is not known:")
        for one in unknown:
            print(f"  {one.id}: {one.column} = {one.value!r}")
    print_readings([one.row for one in rows])
    if cards := sorted({one.row.gpu for one in rows if one.row.capacity is None}):
        print(f"Cards that are not known, so that none of theirs is refused or missed: {cards}")
    print_table(rows)
    print(f"\nTuned on: {', '.join(TUNED_ON)}.")
    print(f"Looked at after a first prediction: {', '.join(LOOKED_AT)}.")
    print("Rows of other sources were never looked at.")
    print_left_out(rows)


def print_readings(rows: Iterable[Row]) -> None:
    """What was read into values that say nothing, or one of several things."""
    readings: dict[str, list[str]] = {}
    for row in rows:
        for reading in row.readings:
            readings.setdefault(reading, []).append(row.id)
    if readings:
        print("Read into rows that are silent, or may be read in several ways:")
    for reading, ids in readings.items():
        print(f"  {reading}: {', '.join(ids[:3])}{f' and {len(ids) - 3} more' if ids[3:] else ''}")


def print_rows(rows: Iterable[Measured]) -> None:
    print(f"{'id':<14}{'measured':>10}{'predicted':>11}{'error':>8}  GB, metric")
    for one in rows:
        peak = in_metric(one.row, one.allocated, Constants())
        if one.row.peak is None:
            print(f"{one.row.id:<14}{'oom':>10}{peak.device / 1e9:>11.1f}{'':>8}  device")
            continue
        error = one.error(Constants())
        numbers = f"{one.row.peak / 1e9:>10.1f}{peak.metric / 1e9:>11.1f}{error:>+8.1%}"
        print(f"{one.row.id:<14}{numbers}  {one.row.metric}")


def print_table(rows: Sequence[Measured]) -> None:
    header = f"{'rows':>5}{'median':>8}{'worst under':>13}{'under':>7}{'refused':>9}{'missed':>8}"
    allocated = {one.row: one.allocated for one in rows}

    def plimsoll(row: Row, device: bool = False) -> float:
        peak = in_metric(row, allocated[row], Constants())
        return peak.device if device else peak.metric

    print(f"\n{'':<34}{header}")
    for title, members in groups(rows):
        print(title)
        print(f"  {'Plimsoll':<32}{line(members, plimsoll, lambda r: plimsoll(r, device=True))}")
        for name, estimate in (
            ("DeepSpeed's estimator (states)", deepspeed_estimate),
            ("closed form", closed_form),
        ):
            print(f"  {name:<32}{line(members, estimate, estimate)}")
    print(
        "median: of the absolute errors. under: share of predictions below the peak. refused: rows"
        "\npredicted over their card that ran. missed: rows that ran out, predicted to fit."
    )


def groups(rows: Iterable[Measured]) -> Iterable[tuple[str, list[Row]]]:
    """By source, metric, whether lengths vary, and whether the row's own figure is trusted."""

    def title(row: Row) -> str:
        trusted = "" if row.confident else ", of low confidence"
        varied = ", lengths vary" if row.varied and row.metric != "allocated" else ""
        return f"{row.source}: {row.metric}{varied}{trusted}"

    ordered = sorted((one.row for one in rows), key=title)
    return [(name, list(members)) for name, members in groupby(ordered, key=title)]


def line(rows: Sequence[Row], metric: Estimator, device: Estimator) -> str:
    """The numbers of one estimator over some rows."""
    ran = [row for row in rows if row.peak is not None]
    errors = [metric(row) / row.peak - 1 for row in ran if row.peak]
    over = [row for row in rows if row.capacity is not None and device(row) > row.capacity]
    refused = sum(row.peak is not None for row in over)
    missed = sum(row.peak is None and row.capacity is not None for row in rows) - (
        len(over) - refused
    )
    if not errors:
        return f"{len(rows):>5}{'':>28}{refused:>9}{missed:>8}"
    median = statistics.median(abs(error) for error in errors)
    under = sum(error < 0 for error in errors) / len(errors)
    worst = min([0.0, *errors])
    return f"{len(rows):>5}{median:>8.1%}{worst:>13.1%}{under:>7.0%}{refused:>9}{missed:>8}"


def print_left_out(rows: Sequence[Measured]) -> None:
    """The two constants fitted on each source alone, and the other sources' errors with them."""
    trusted = [one for one in rows if one.row.confident and one.row.peak is not None]
    sources = sorted({one.row.source for one in trusted})
    if len(sources) < 2:
        return
    print("\nFitted on one source alone, judged on the others (low confidence apart):")
    for source in sources:
        fitted = fit([one for one in trusted if one.row.source == source])
        rest = [one.error(fitted) for one in trusted if one.row.source != source]
        median = statistics.median(abs(error) for error in rest)
        print(
            f"  {source}: gap {fitted.allocator_gap:.0%}, context "
            f"{fitted.cuda_context / 2**30:.2f} GiB; the others' median {median:.1%}, "
            f"worst under {min(rest):.1%}"
        )


def fit(rows: Sequence[Measured]) -> Constants:
    """The gap, and the context if any of these rows shows it, with the least median error."""
    shows_context = any(one.row.metric in ("device", "unstated") for one in rows)
    contexts = CONTEXTS if shows_context else (Constants().cuda_context,)
    source = "fitted on published rows"
    candidates = [
        Constants().calibrated(source, allocator_gap=gap, cuda_context=context)
        for gap in GAPS
        for context in contexts
    ]

    def median(constants: Constants) -> float:
        return statistics.median(abs(one.error(constants)) for one in rows)

    return min(candidates, key=median)


if __name__ == "__main__":
    sys.exit(main())
