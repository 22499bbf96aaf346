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
from typing import Literal

from plimsoll.errors import ConfigError
from plimsoll.memory.machine.hardware import find_card
from plimsoll.memory.shapes.known_models import known_models, read_shape
from plimsoll.memory.shapes.shape import ModelShape

COLUMNS = (
    *("id", "source", "task", "model", "params_b", "gpu", "n_gpus", "strategy", "offload", "peft"),
    *("dtype", "micro_batch", "seq_len", "grad_ckpt", "flash_attn", "optimizer"),
    *("reported_peak_gb_per_gpu", "notes", "confidence"),
)

Strategy = Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp"]
Precision = Literal["mixed", "pure", "fp32", "fp32 weights"]
Metric = Literal["allocated", "reserved", "device", "unstated"]
Quantization = Literal["none", "nf4", "gptq", "int8"]


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

    precision: mixed is 16-bit compute, whatever keeps the fp32 masters; pure has no fp32 at all;
    fp32 weights are what 16-bit compute is gathered from. moments: bytes of the optimizer's state
    per fp32 number. foreach: the optimizer makes a copy of all it updates. keeps_gradients: False
    where each weight is updated in the backward. chunk: rows of logits at once; None: all.
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
    optimizer_offload: bool
    weight_offload: bool
    adapter: Adapter | None
    quantization: Quantization
    precision: Precision
    moments: float
    foreach: bool
    keeps_gradients: bool
    sequences: int
    tokens: int
    checkpointed: bool
    inputs_on_host: bool
    eager: bool
    chunk: int | None
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
            except _NotKnown as error:
                yield Unknown(raw["id"], error.column, error.value)


class _NotKnown(Exception):
    def __init__(self, column: str, value: str) -> None:
        super().__init__(column, value)
        self.column, self.value = column, value


def _row(raw: dict[str, str]) -> Row:
    text = {name: value.lower() for name, value in raw.items()}
    strategy = _strategy(text)
    pair = "dpo" in text["task"]
    adapter = _adapter(text)
    optimizer_offload, weight_offload = _offloads(text, "optim"), _offloads(text, "param|weight")
    if (optimizer_offload and "zero" not in strategy) or (weight_offload and strategy != "zero3"):
        raise _NotKnown("offload", raw["offload"])
    return Row(
        id=raw["id"],
        source=re.split(r"[@: ]", raw["source"], maxsplit=1)[0],
        shape=_shape(raw["model"]),
        gpu=raw["gpu"],
        capacity=_capacity(raw["gpu"]),
        ranks=_integer(raw, "n_gpus"),
        strategy=strategy,
        optimizer_offload=optimizer_offload,
        weight_offload=weight_offload,
        adapter=adapter,
        quantization=_quantization(text),
        precision=_precision(text, strategy),
        moments=_moments(text),
        foreach=not re.search(r"fused|deepspeed|8-?bit|paged", text["optimizer"]),
        keeps_gradients=not re.search(r"in[_ ](bwd|backward)", text["optimizer"] + text["notes"]),
        sequences=_integer(raw, "micro_batch") * (2 if pair else 1),
        tokens=_integer(raw, "micro_batch") * _integer(raw, "seq_len") * (2 if pair else 1),
        checkpointed=_choice(text, "grad_ckpt", _CHECKPOINTING),
        inputs_on_host="offload" in text["grad_ckpt"] or "activation" in text["offload"],
        eager=_choice(text, "flash_attn", _ATTENTION),
        chunk=_chunk(text),
        reference=_task(text) and pair and adapter is None,
        peak=_peak(text),
        metric=_metric(text["notes"]),
        confident=text["confidence"] != "low",
    )


_CHECKPOINTING = (
    (r"^(no|none|false|off)\b", False),
    (r"^(yes|full|true|on|recompute|offload|unsloth)\b", True),
)
_ATTENTION = (
    (r"^(no|none|false|eager)\b", True),
    (r"flash|fa-?[234]|sdpa|yes|true|varlen|xformers|fmha", False),
)
_TASKS = ((r"sft|finetun|fine-tun|pretrain|\blm\b|cpt", True), (r"trainer only|dpo", True))


def _choice(text: dict[str, str], column: str, known: tuple[tuple[str, bool], ...]) -> bool:
    for pattern, value in known:
        if re.search(pattern, text[column]):
            return value
    raise _NotKnown(column, text[column])


def _task(text: dict[str, str]) -> bool:
    """Only jobs with one trained model are modelled (and DPO's frozen one)."""
    return _choice(text, "task", _TASKS)


def _shape(name: str) -> ModelShape:
    """A known model, also where its organisation, `-hf` or `Meta-` are left out."""
    spelled = re.sub(r"\bQwen-1\.8B", "Qwen-1_8B", name)
    found = [known for known in known_models() if _bare(known) == _bare(spelled)]
    if not found:
        raise _NotKnown("model", name)
    return read_shape(found[0])


def _bare(name: str) -> str:
    last = name.lower().rpartition("/")[2].removeprefix("meta-").removesuffix("-hf")
    return re.sub(r"[ _-]+", "-", last)


def _capacity(gpu: str) -> int | None:
    try:
        return find_card(gpu).usable_bytes
    except ConfigError:
        return None


def _integer(raw: dict[str, str], column: str) -> int:
    digits = raw[column].replace(",", "")
    if not re.fullmatch(r"\d+", digits) or int(digits) == 0:
        raise _NotKnown(column, raw[column])
    return int(digits)


def _strategy(text: dict[str, str]) -> Strategy:
    value = text["strategy"]
    if re.search(r"\bfsdp2?\b", value):  # before ZeRO, which it is often likened to
        return "fsdp"
    if match := re.search(r"zero[- _]?(?:stage)?[- _]?([123])(?!\d)", value):
        stages: dict[str, Strategy] = {"1": "zero1", "2": "zero2", "3": "zero3"}
        return stages[match[1]]
    if re.search(r"\bddp\b|data parallel", value):
        return "ddp"
    if re.search(r"single|^none$|^1 ?gpu", value):
        return "single"
    raise _NotKnown("strategy", value)


def _offloads(text: dict[str, str], what: str) -> bool:
    value = text["offload"]
    known = r"optim\w*|param\w*|weights?|states?|activations?|cpu|to|and|none|no|false"
    if not re.fullmatch(rf"(({known})\W*)*", value):
        raise _NotKnown("offload", value)
    return bool(re.search(what, value))


def _adapter(text: dict[str, str]) -> Adapter | None:
    value = text["peft"]
    if re.fullmatch(r"|no|none|full|false", value):
        return None
    rank = re.search(r"\br(?:ank)?[ =]?(\d+)\b", value)
    if "lora" not in value or rank is None:
        raise _NotKnown("peft", value)
    together = re.search(r"x(\d+) concurrent", value)
    ends = bool(re.search(r"embed|lm_head", value))
    targets = tuple(re.findall(r"\b\w+_proj\b", value)) or ("all-linear",)
    return Adapter(int(rank[1]), int(together[1]) if together else 1, ends, targets)


def _quantization(text: dict[str, str]) -> Quantization:
    value = f"{text['peft']} {text['dtype']}"
    if "gptq" in value:
        return "gptq"
    if re.search(r"nf4|4-?bit|int4|qlora", value):
        return "nf4"
    return "int8" if re.search(r"\bint8\b|\b8-?bit weights|llm\.int8", value) else "none"


def _precision(text: dict[str, str], strategy: Strategy) -> Precision:
    value = text["dtype"]
    if re.search(r"pure|bf16 (?:weights|params)", value) or (
        "torchtune" in text["source"] and re.fullmatch(r"bf16", value)
    ):
        return "pure"
    if re.search(r"(fp|float)32 (?:params|weights|master)", value):
        return "fp32 weights"
    if re.search(r"\bb?f(?:loat|p)?16\b|amp|mixed|4-?bit|nf4|int[48]", value):
        return "fp32 weights" if strategy == "fsdp" and not text["peft"].count("lora") else "mixed"
    if re.fullmatch(r"(fp|float)32|tf32", value):
        return "fp32"
    raise _NotKnown("dtype", value)


def _moments(text: dict[str, str]) -> float:
    """Bytes per parameter of states in fp32, or in 8 bits. Paged states are managed memory, which
    torch does not count."""
    value = text["optimizer"]
    if "paged" in value and _metric(text["notes"]) in ("allocated", "reserved"):
        return 0.0
    kinds = (("adam", 8.0), ("lion", 4.0), ("adafactor", 0.02), ("sgd", 0.0))
    for name, each in kinds:
        if name in value:
            return each / 4 if re.search(r"8-?bit", value) else each
    raise _NotKnown("optimizer", value)


def _chunk(text: dict[str, str]) -> int | None:
    notes = text["notes"]
    if match := re.search(r"chunked (?:lm )?head \((\d+)\)|chunk(?:s of| size)? ?=? ?(\d+)", notes):
        return int(match[1] or match[2])
    if re.search(r"liger|fused (?:linear )?cross|cut cross|fused (?:chunked )?(?:lm )?head", notes):
        return 1024
    return None


def _peak(text: dict[str, str]) -> float | None:
    """Bytes: GiB only where the notes say so."""
    value = text["reported_peak_gb_per_gpu"]
    if re.search(r"oom|out of memory", value):
        return None
    if not re.fullmatch(r"\d+(\.\d+)?", value):
        raise _NotKnown("reported_peak_gb_per_gpu", value)
    unit = 2**30 if re.search(r"\bgib\b", text["notes"]) else 1e9
    return float(value) * unit


def _metric(notes: str) -> Metric:
    if re.search(r"reserved", notes):
        return "reserved"
    if re.search(r"allocated", notes):
        return "allocated"
    return "device" if re.search(r"nvidia-smi|nvml|device[- ]used", notes) else "unstated"
