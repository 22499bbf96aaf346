"""Published peaks of memory: a CSV row as typed facts, or the reason why it cannot be one.

Free text is matched by whole words. A value that matches nothing is an `Unknown`: it is listed, and
its row left out, because a guess would measure the guess. Where a row is silent on what every
framework does alike, or may be read in several ways, the reading that was taken is kept with it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import peak_attention as attention
import peak_losses as losses
import peak_names as names
import peak_numbers as numbers
import peak_policies as policies
import peak_projects as projects
import peak_words as words
from peak_numbers import Metric, NotKnown, Text
from peak_words import Precision, Quantization, Strategy
from plimsoll.errors import ConfigError
from plimsoll.shapes.shape import ModelShape

COLUMNS = (
    *("id", "source", "task", "model", "params_b", "gpu", "n_gpus", "strategy", "offload", "peft"),
    *("dtype", "micro_batch", "seq_len", "grad_ckpt", "flash_attn", "optimizer"),
    *("reported_peak_gb_per_gpu", "notes", "confidence"),
)
_OPTIONAL = ("params_b", "gpu", "offload", "flash_attn", "optimizer", "notes", "confidence")
"""Columns that a file may leave out, as a row their values."""


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

    kept_gathered: FSDP keeps gathered weights from forward to backward. one_unit: it gathers all of
    them at once.
    auto_buckets: transformers' integration sets DeepSpeed's sizes by the hidden size.
    precision: mixed is 16-bit compute, whatever keeps the fp32 masters; pure has no fp32 at all;
    fp32 weights are what 16-bit compute is gathered from. prepared: PEFT made fp32 of what is not
    in 4 or 8 bits. wide_adapter: its weights are fp32. dropout, reentrant: of adapters and of
    checkpoints; None: as its project has them. moments: bytes of the optimizer's state per fp32
    number. foreach: the optimizer makes a copy of all it updates. keeps_gradients: False where each
    weight is updated in the backward. accumulates: gradients over several micro-batches. chunk:
    rows of logits at once; None: all. head_copies: of all its weights, in fp32 and 16 bits, for
    each chunk. chunked_loss: logits are all there, and the loss is of some at a time.
    loss_in_place: one kernel turns logits into their gradient. fused_layers: Liger's norms and
    MLPs; None: as its project has them. math: attention in fp32, of keys and values that are
    repeated, and its scores are written out: PyTorch has no kernel for it, or none is used.
    compiled: by torch.compile. completion: tokens of a sequence that have logits; None: all.
    varied: lengths differ from step to step, so that what is reserved depends on their order.
    readings: what was read into values that are silent or may be read in several ways. bucket:
    elements of DeepSpeed's gradients; None, and of prepared and holds_output: as its project has
    them. autocast: torch.autocast casts fp32 weights. uncast: nothing casts what they make.
    holds_output: until the backward is done. selective: attention and every other product of a
    checkpointed layer are kept.
    peak: bytes; None: it ran out. capacity: bytes of the card; None: which card is not known, and
    only whether the row would have been refused depends on it.
    """

    id: str
    source: str
    framework: str
    readings: tuple[str, ...]
    shape: ModelShape
    gpu: str
    capacity: int | None
    ranks: int
    strategy: Strategy
    kept_gathered: bool
    one_unit: bool
    auto_buckets: bool
    bucket: int | None
    optimizer_offload: bool
    weight_offload: bool
    adapter: Adapter | None
    quantization: Quantization
    precision: Precision
    autocast: bool
    uncast: bool
    prepared: bool | None
    wide_adapter: bool
    dropout: bool | None
    moments: float
    foreach: bool
    keeps_gradients: bool
    accumulates: bool
    sequences: int
    tokens: int
    completion: int | None
    checkpointed: bool
    selective: bool
    reentrant: bool | None
    inputs_on_host: bool
    eager: bool
    math: bool
    chunk: int | None
    head_copies: bool
    chunked_loss: bool
    loss_in_place: bool
    holds_output: bool | None
    fused_layers: bool | None
    compiled: bool
    varied: bool
    reference: bool
    kto: bool
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
    """Every row of a file with these columns, in any order, beside any others; ConfigError where
    they are not there."""
    try:
        rows = list(csv.DictReader(path.read_text("utf-8-sig").splitlines(keepends=True)))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}. Save it as UTF-8.") from error
    lines = [{(k or "").strip().lower(): v for k, v in row.items()} for row in rows]
    if absent := set(COLUMNS) - set(_OPTIONAL) - set(lines[0] if lines else ()):
        raise ConfigError(f"{path} has no column {', '.join(sorted(absent))}.")
    for line in lines:
        raw = {name: (line.get(name) or "").strip() for name in COLUMNS}
        if any(raw.values()):
            try:
                yield _row(raw)
            except NotKnown as error:
                yield Unknown(raw["id"], error.column, error.value)


_SILENT = r"|[-–?]|n/?a|unknown|default|unspecified|not (?:stated|given|said|known|specified)"


def _assumed(text: Text) -> Iterator[tuple[str, str]]:
    """What is read into columns that are silent: that nothing unusual was done. transformers,
    torchtune and LitGPT have had PyTorch's fused attention since 2023; how an adapter's few
    parameters are optimised hardly weighs."""
    alone = re.fullmatch(r"1(?: ?x)?", text["n_gpus"])
    assumed = {
        "offload": "none",
        "flash_attn": "sdpa",
        **({"strategy": "single"} if alone else {}),
        **({"optimizer": "adamw"} if "lora" in text["peft"] else {}),
    }
    return ((k, v) for k, v in assumed.items() if re.fullmatch(_SILENT, text[k]))


def _row(raw: dict[str, str]) -> Row:
    text = {name: value.lower() for name, value in raw.items()}
    assumed = dict(_assumed(text))
    text |= assumed
    shape, as_model = names.shape(raw["model"])
    peak, as_peak = numbers.peak(text["reported_peak_gb_per_gpu"], text["notes"])
    said = [f"{column}, silent: {value}" for column, value in assumed.items()]
    strategy = words.strategy(text)
    pair = words.pairs(text)
    adapter = _adapter(text)
    if adapter and adapter.targets == ("all-linear",) and "all" not in text["peft"]:
        said.append("peft, silent on targets: every linear layer")
    optimizer_offload, weight_offload = _offloads(raw, text, strategy)
    _refuse_optimizer(raw, text, strategy, optimizer_offload)
    sequences = numbers.integer("micro_batch", raw["micro_batch"]) * (2 if pair else 1)
    source = re.split(r"[@: ]", raw["source"], maxsplit=1)[0]
    return Row(
        id=raw["id"],
        source=source,
        framework=projects.framework(source, words.by(text)),
        readings=tuple(one for one in (*said, as_model, as_peak) if one),
        shape=shape,
        gpu=raw["gpu"],
        capacity=names.capacity(raw["gpu"]),
        ranks=numbers.integer("n_gpus", raw["n_gpus"]),
        strategy=strategy,
        kept_gathered=words.kept_gathered(text),
        one_unit=words.one_unit(text),
        auto_buckets="auto" in text["strategy"],
        bucket=words.bucket(text),
        optimizer_offload=optimizer_offload,
        weight_offload=weight_offload,
        adapter=adapter,
        quantization=words.quantization(text),
        precision=words.precision(text, strategy),
        autocast=words.autocast(text, strategy),
        uncast=words.uncast(text),
        prepared=words.prepared(text, strategy),
        dropout=words.dropout(text),
        wide_adapter=words.wide_adapters(text, strategy),
        moments=words.moments(text),
        foreach=not re.search(r"fused|deepspeed|8-?bit|paged", text["optimizer"]),
        keeps_gradients=not re.search(r"in[_ ](bwd|backward)", text["optimizer"] + text["notes"]),
        accumulates=words.accumulates(text),
        sequences=sequences,
        tokens=sequences * numbers.integer("seq_len", raw["seq_len"]),
        completion=policies.completion(text),
        checkpointed=words.checkpointed(text),
        selective=words.selective(text),
        reentrant=words.reentrant(text),
        inputs_on_host=bool(re.search("offload|unsloth", text["grad_ckpt"]))
        or "activation" in text["offload"],
        eager=attention.eager(text),
        math=attention.math(text, grouped=shape.kv_heads < shape.heads),
        chunk=losses.chunk(text),
        head_copies=losses.head_copies(text),
        chunked_loss=losses.chunked_loss(text),
        loss_in_place=losses.loss_in_place(text),
        holds_output=losses.holds_output(text),
        fused_layers=words.fused_layers(text),
        compiled=bool(re.search(r"\bcompile\b", text["notes"])),
        varied=words.varied(text),
        kto=bool(re.search(r"\bkto\b", text["task"])),
        reference=words.task(text) and words.reference(text) and adapter is None,
        peak=peak,
        metric=numbers.metric(text["notes"]),
        confident=not text["confidence"].startswith("low"),
    )


def _offloads(raw: Text, text: Text, strategy: Strategy) -> tuple[bool, bool]:
    """Whether the optimizer and the weights are on the host."""
    optimizer, weights = words.offloads(text, "optim"), words.offloads(text, "param|weight")
    if (optimizer and not (weights or "zero" in strategy)) or (
        weights and strategy not in ("zero3", "fsdp")
    ):
        raise NotKnown("offload", raw["offload"])
    return optimizer, weights


def _refuse_optimizer(raw: Text, text: Text, strategy: Strategy, offloaded: bool) -> None:
    on_host = "cpu" in text["optimizer"] and not offloaded
    narrow = re.search(r"b?f(?:loat|p)?16 (?:states|moments)", text["optimizer"])
    if on_host or (narrow and words.wide_adapters(text, strategy)):
        raise NotKnown("optimizer", raw["optimizer"])


def _adapter(text: dict[str, str]) -> Adapter | None:
    value = text["peft"]
    if re.fullmatch(
        r"|no(?:ne| peft| lora)?|(?:none \()?full(?:[ -](?:.*tun.*|ft|param.*))?\)?|false", value
    ):
        if re.search(r"\bq?lora\b", text["task"]):
            raise NotKnown("peft", value)  # of what rank?
        return None
    rank = re.search(r"(?:(?:\b|_)r(?:ank)?[ =:-]*|lora[ -])(\d+)\b", value)
    if "lora" not in value or rank is None or re.search(r"ada-?lora|long-?lora|lora-?fa", value):
        raise NotKnown("peft", value)
    together = re.search(r"x(\d+) concurrent", value)
    ends = bool(re.search(r"embed|lm_head", value))
    return Adapter(int(rank[1]), int(together[1]) if together else 1, ends, words.targets(text))
