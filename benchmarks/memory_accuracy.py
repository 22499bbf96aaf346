"""The plan's formulas against published peaks of GPU memory, by source and row by row.

    python benchmarks/memory_accuracy.py [CSV ...] [--rows]

Without a file it reads peaks.csv. README.md, beside it, says what the columns mean. Exit code 2: a
file that is not there, that has not the columns, or a value that cannot be read.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

from plimsoll.errors import ConfigError
from plimsoll.machine.hardware import known_card
from plimsoll.memory.contents.overheads import Constants
from plimsoll.model.price import form as forms
from plimsoll.model.price.activations import activation_items, backward_items
from plimsoll.shapes.known_models import read_shape
from plimsoll.shapes.shape import MicroBatch, ModelShape, parameter_tensors
from plimsoll.timeline.items import Allocation, Moment
from plimsoll.trainer.zero.settings import Counts, ZeroSizes
from plimsoll.trainer.zero.states import BOTH_TABLES, layers_left, norm_copies, zero_states

PEAKS = Path(__file__).with_name("peaks.csv")
COLUMNS = ("id", "source", "model", "cards", "sequences", "seq_len", "measured_gb", "metric")
"""Those that a file must have."""
LIVES = ("always", "training", "computing", "backward", "reducing", "norming", "stepping")
"""When what a framework keeps is there (timeline/items.py)."""
UNFUSED = 16  # bytes of a logit in `UnfusedHead`


@dataclass(frozen=True)
class Row:
    """A published run: its columns by name, and what they come to."""

    columns: dict[str, str]

    def __getitem__(self, column: str) -> str:
        return self.columns.get(column, "")

    def number(self, column: str, silent: float = 0) -> float:
        """`silent` where the column is empty."""
        return float(self[column] or silent)

    def count(self, column: str, silent: int = 0) -> int:
        return int(self[column] or silent)

    @cached_property
    def shape(self) -> ModelShape:
        shape = read_shape(self["model"])
        return replace(shape, tied=False) if self["tied"] == "no" else shape

    @cached_property
    def work(self) -> MicroBatch:
        sequences, longest = self.count("sequences"), self.count("seq_len")
        return MicroBatch(sequences * longest, sequences, longest, sequences * longest)

    @cached_property
    def form(self) -> forms.ActivationForm:
        rank, chunk = self.count("adapter_rank"), self.count("head_chunk")
        targets, dropout = self["adapter_targets"] or "all-linear", self["adapter_dropout"] == "yes"
        each = self.count("adapter_bytes", 4)
        return forms.ActivationForm(
            element=self.count("activation_bytes", 2),
            checkpoint_every=1 if self["checkpointing"] else None,
            attention="eager" if self["attention"] == "eager" else "varlen",
            head=forms.ChunkedHead(chunk, entropy=True) if chunk else forms.UnfusedHead(),
            trained=True,
            adapter=forms.AdapterForm(rank, tuple(targets.split()), each, dropout)
            if rank
            else None,
            quantized=bool(self["quantization"]),
            inputs_on_host="activations" in self["offload"],
            selective=self["checkpointing"] == "selective",
        )

    @cached_property
    def zero(self) -> tuple[Counts, ZeroSizes]:
        """DeepSpeed with gradients as wide as weights, as transformers' Trainer sets it up."""
        element, bucket = 4 if self["dtype"] == "fp32" else 2, self.count("bucket", 500_000_000)
        tensors = () if self["trained"] else tuple(parameter_tensors(self.shape))
        largest = max((one.elements for one in tensors), default=0)
        oversized = sum(one.parameters for one in tensors if one.elements > bucket)
        trained = self.count("trained", self.shape.parameters)
        sizes = ZeroSizes(
            stage=self.count("zero_stage"),
            ranks=self.count("cards"),
            accumulate=element,
            bucket=2 * bucket,  # overlap_comm has two
            prefetch=self.count("prefetch", 50_000_000),
            live=1_000_000_000,
            sub_group=1_000_000_000,
            offload="optimizer" in self["offload"],
            offload_weights="weights" in self["offload"],
        )
        return Counts(trained, 0, largest, element, oversized=oversized), sizes

    @cached_property
    def states(self) -> dict[str, float]:
        """Bytes of each life: those that the table has, and DeepSpeed's."""
        found = {life: 1e9 * self.number(f"{life}_gb") for life in LIVES}
        if self["method"] == "deepspeed":
            for kept in (*zero_states(*self.zero, "cuda"), *norm_copies(*self.zero, "cuda")):
                life = "always" if kept.life in ("built", "stepped") else kept.life
                if kept.where == "device" and life in found:
                    found[life] += kept.bytes
        return found

    @cached_property
    def highest(self) -> float:
        """Activations where they are most."""
        held = activation_items("actor", self.shape, self.work, self.form, "train_actor")
        return self.device_bytes(held, self.shape.layers)

    def left(self, layers: int) -> float:
        """Activations where the last of the first so many layers is undone."""
        at = Moment("train_actor", "backward")
        held = backward_items("actor", self.shape, self.work, self.form, at, layers)
        output = self.number("output_bytes") * self.work.tokens * self.shape.vocabulary
        return self.device_bytes(held, layers) + output if layers else 0

    def device_bytes(self, held: Iterable[Allocation], layers: int) -> float:
        """Logits as wide as this framework's, and what else it keeps."""
        logit = self.number("logit_bytes", 12) / UNFUSED
        on_card = (one.item for one in held if one.item.where == "device")
        priced = sum(one.bytes * (logit if one.name == "logits" else 1) for one in on_card)
        each = self.number("token_bytes") + layers * self.number("checkpoint_bytes")
        return priced + self.work.tokens * each

    @property
    def unreduced(self) -> int:
        """Layers that are left when gradients are first reduced."""
        if not self["zero_stage"]:
            return self.count("layers_at_reduce", self.shape.layers)
        counts, sizes = self.zero
        one = replace(sizes, bucket=sizes.bucket // 2)
        return layers_left(self.shape, counts.trained, one, () if self["trained"] else BOTH_TABLES)

    @property
    def at_end(self) -> float:
        """Activations where the first layer is undone, or all checkpoints and their gradients."""
        if not self["checkpoints"]:
            return self.left(1)
        layers = self.shape.layers
        return self.left(layers) + 2 * self.work.tokens * self.shape.hidden * layers

    @cached_property
    def allocated(self) -> float:
        """The most of a step: forward, backward, the first reduction of gradients, the backward's
        end, the gradients' norm and the optimizer's step."""

        def living(*lifetimes: str) -> float:
            return sum(self.states[life] for life in ("always", *lifetimes))

        before = () if self["gradients"] else ("training",)
        late = ("training",) if self["gradients"] == "late" else before
        early = "optimizer" in self["offload"] and self["zero_stage"] in ("1", "2")
        return max(
            living("computing", "backward", *late) + self.highest,
            living("computing", "backward", *before) + self.left(self.shape.layers),
            living("computing", "backward", "reducing", *before) + self.left(self.unreduced),
            living("computing", "backward", "training") + self.at_end,
            living("norming", *(("computing", "backward", *before) if early else ("training",))),
            living("training", "stepping"),
        )

    @property
    def device(self) -> float:
        """What the card shows."""
        constants = Constants()
        shared = constants.nccl_communicator if self.count("cards") > 1 else 0
        return self.allocated * (1 + constants.allocator_gap) + constants.cuda_context + shared

    @property
    def predicted(self) -> float:
        """In the row's own metric; as the card shows it if none is stated, or if it ran out."""
        reserved = self.allocated * (1 + Constants().allocator_gap)
        told = {"allocated": self.allocated, "reserved": reserved} if self["measured_gb"] else {}
        return told.get(self["metric"], self.device)

    @property
    def error(self) -> float | None:
        """As a share of the peak, below 0 where it is too low; None where the run ran out."""
        measured = 1e9 * self.number("measured_gb")
        return self.predicted / measured - 1 if measured else None

    @property
    def refused(self) -> bool | None:
        """Whether the card is predicted to be too small; None: it is not known."""
        card = known_card(self["card"])
        return self.device > card.usable_bytes if card else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="CSV", default=[PEAKS])
    parser.add_argument("--rows", action="store_true", help="list every row")
    arguments = parser.parse_args()
    try:
        report([row for file in arguments.files for row in read_rows(file)], arguments.rows)
    except (OSError, ValueError, ConfigError) as error:
        print(f"memory_accuracy: {error}", file=sys.stderr)
        return 2
    return 0


def read_rows(file: Path) -> list[Row]:
    """Every row of a table; a column that it lacks is empty in each. ConfigError without those that
    it must have."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = list(csv.DictReader(lines))
    if absent := [one for one in COLUMNS if rows and one not in rows[0]]:
        raise ConfigError(f"{file} has no column {', '.join(absent)}: see benchmarks/README.md.")
    return [Row(row) for row in rows]


def report(rows: Sequence[Row], every_row: bool) -> None:
    if every_row:
        for row in rows:
            sizes = f"{row['measured_gb'] or 'ran out':>14}{row.predicted / 1e9:>9.1f} GB"
            error = "" if row.error is None else f"{row.error:+.1%}"
            print(f"{row['id']:<18}{sizes}{error:>9}  {row['metric']}")
    groups = {k: list(rows) for k, rows in groupby(sorted(rows, key=title), key=title)}
    groups["all but those of low confidence"] = [r for r in rows if r["confidence"] != "low"]
    width = max(map(len, groups))
    print(f"{'':<{width}} rows  median  too low  too high  refused  missed")
    for name, members in groups.items():
        print(f"{name:<{width}}{line(members)}")
    print(
        "median: of the absolute errors. too low, too high: the worst. refused: rows that ran,"
        "\npredicted over their card. missed: rows that ran out, predicted to fit."
    )


def title(row: Row) -> str:
    """By source, metric, whether lengths vary, and whether the row's own figure is trusted."""
    varied = ", lengths vary" if row["lengths"] == "vary" and row["metric"] != "allocated" else ""
    low = ", of low confidence" if row["confidence"] == "low" else ""
    return f"{row['source']}: {row['metric']}{varied}{low}"


def line(rows: Sequence[Row]) -> str:
    """The numbers of some rows."""
    errors = [row.error for row in rows if row.error is not None]
    refused = sum(row.refused is True for row in rows if row.error is not None)
    missed = sum(row.refused is False for row in rows if row.error is None)
    if not errors:
        return f"{len(rows):>5}{'':>27}{refused:>9}{missed:>8}"
    median = statistics.median(map(abs, errors))
    low, high = min([0.0, *errors]), max([0.0, *errors])
    return f"{len(rows):>5}{median:>8.1%}{low:>9.1%}{high:>10.1%}{refused:>9}{missed:>8}"


if __name__ == "__main__":
    sys.exit(main())
