"""Published peaks of memory: a CSV row as typed facts, or the reason why it cannot be one.

Free text is matched by whole words. A value that matches nothing is an `Unknown`: it is listed, and
its row left out, because a guess would measure the guess.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import peak_words as words
from peak_words import Metric, NotKnown, Precision, Quantization, Strategy
from plimsoll.errors import ConfigError
from plimsoll.memory.shapes.shape import ModelShape

COLUMNS = (
    *("id", "source", "task", "model", "params_b", "gpu", "n_gpus", "strategy", "offload", "peft"),
    *("dtype", "micro_batch", "seq_len", "grad_ckpt", "flash_attn", "optimizer"),
    *("reported_peak_gb_per_gpu", "notes", "confidence"),
)


@dataclass(frozen=True)
class Adapter:
    """rank, and how many train beside each other. ends: embedding and head are trained too.
    targets: last parts of the names of linears, or all-linear."""

    rank: int
    together: int = 1
    ends: bool = False
    targets: tuple[str, ...] = ("all-linear",)


@dataclass(frozen=True)
class Row:
    """What a peak was measured on.

    auto_buckets: transformers' integration sets DeepSpeed's sizes by the hidden size.
    precision: mixed is 16-bit compute, whatever keeps the fp32 masters; pure has no fp32 at all;
    fp32 weights are what 16-bit compute is gathered from. prepared: PEFT made fp32 of what is not
    in 4 or 8 bits. wide_adapter: its weights are fp32. dropout, reentrant: of adapters and of
    checkpoints; None: as its project has them. moments: bytes of the optimizer's state per fp32
    number. foreach: the optimizer makes a copy of all it updates. keeps_gradients: False where each
    weight is updated in the backward. accumulates: gradients over several micro-batches. chunk:
    rows of logits at once; None: all. chunked_loss: logits are all there, and the loss is of some
    at a time. loss_in_place: one kernel turns logits into their gradient. fused_layers: Liger's
    norms and MLPs. compiled: by torch.compile. varied: lengths differ from step to step, so that
    what is reserved depends on their order.
    peak: bytes; None: it ran out. capacity: bytes of the card; None: which card is not known, and
    only whether the row would have been refused depends on it.
    """

    id: str
    source: str
    shape: ModelShape
    gpu: str
    capacity: int | None
    ranks: int
    strategy: Strategy
    auto_buckets: bool
    optimizer_offload: bool
    weight_offload: bool
    adapter: Adapter | None
    quantization: Quantization
    precision: Precision
    prepared: bool
    wide_adapter: bool
    dropout: bool | None
    moments: float
    foreach: bool
    keeps_gradients: bool
    accumulates: bool
    sequences: int
    tokens: int
    checkpointed: bool
    reentrant: bool | None
    inputs_on_host: bool
    eager: bool
    chunk: int | None
    chunked_loss: bool
    loss_in_place: bool
    fused_layers: bool
    compiled: bool
    varied: bool
    reference: bool
    peak: float | None
    metric: Metric
    confident: bool


@dataclass(frozen=True)
class Unknown:
    """A value that nothing here knows."""

    id: str
    column: str
    value: str


def read_rows(path: Path) -> Iterator[Row | Unknown]:
    """Every row of a file with these columns; ConfigError where they are not there."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        absent = set(COLUMNS) - set(reader.fieldnames or ())
        if absent:
            raise ConfigError(f"{path} has no column {', '.join(sorted(absent))}.")
        for raw in reader:
            try:
                yield _row({name: (raw[name] or "").strip() for name in COLUMNS})
            except NotKnown as error:
                yield Unknown(raw["id"], error.column, error.value)


def _row(raw: dict[str, str]) -> Row:
    text = {name: value.lower() for name, value in raw.items()}
    strategy = words.strategy(text)
    pair = "dpo" in text["task"]
    adapter = _adapter(text)
    optimizer_offload = words.offloads(text, "optim")
    weight_offload = words.offloads(text, "param|weight")
    if (optimizer_offload and not (weight_offload or "zero" in strategy)) or (
        weight_offload and strategy not in ("zero3", "fsdp")
    ):
        raise NotKnown("offload", raw["offload"])
    sequences = words.integer(raw, "micro_batch") * (2 if pair else 1)
    return Row(
        id=raw["id"],
        source=re.split(r"[@: ]", raw["source"], maxsplit=1)[0],
        shape=words.shape(raw["model"]),
        gpu=raw["gpu"],
        capacity=words.capacity(raw["gpu"]),
        ranks=words.integer(raw, "n_gpus"),
        strategy=strategy,
        auto_buckets="auto" in text["strategy"],
        optimizer_offload=optimizer_offload,
        weight_offload=weight_offload,
        adapter=adapter,
        quantization=words.quantization(text),
        precision=words.precision(text, strategy),
        prepared=words.prepared(text, strategy),
        dropout=words.dropout(text),
        wide_adapter=words.wide_adapters(text, strategy),
        moments=words.moments(text),
        foreach=not re.search(r"fused|deepspeed|8-?bit|paged", text["optimizer"]),
        keeps_gradients=not re.search(r"in[_ ](bwd|backward)", text["optimizer"] + text["notes"]),
        accumulates=words.accumulates(text),
        sequences=sequences,
        tokens=sequences * words.integer(raw, "seq_len"),
        checkpointed=words.checkpointed(text),
        reentrant=words.reentrant(text),
        inputs_on_host="offload" in text["grad_ckpt"] or "activation" in text["offload"],
        eager=words.eager(text),
        chunk=words.chunk(text),
        chunked_loss=bool(re.search(r"chunked_cross_entropy|chunkedoutput", text["notes"])),
        loss_in_place=words.loss_in_place(text),
        fused_layers=words.fused_layers(text),
        compiled=bool(re.search(r"\bcompile\b", text["notes"])),
        varied=bool(re.search(r"samples of \d+ to|padded to the longest", text["notes"])),
        reference=words.task(text) and pair and adapter is None,
        peak=words.peak(text),
        metric=words.metric(text["notes"]),
        confident=text["confidence"] != "low",
    )


def _adapter(text: dict[str, str]) -> Adapter | None:
    value = text["peft"]
    if re.fullmatch(r"|no|none|full|false", value):
        return None
    rank = re.search(r"(?:\b|_)r(?:ank)?[ =:]*(\d+)\b", value)
    if "lora" not in value or rank is None or re.search(r"ada-?lora|long-?lora|lora-?fa", value):
        raise NotKnown("peft", value)
    together = re.search(r"x(\d+) concurrent", value)
    ends = bool(re.search(r"embed|lm_head", value))
    return Adapter(int(rank[1]), int(together[1]) if together else 1, ends, words.targets(text))
