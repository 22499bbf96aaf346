"""What the free text of a published row says, matched by whole words."""

from __future__ import annotations

import re
from typing import Literal

from plimsoll.errors import ConfigError
from plimsoll.memory.machine.hardware import find_card
from plimsoll.memory.shapes.known_models import known_models, read_shape
from plimsoll.memory.shapes.shape import ModelShape

Strategy = Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp"]
Precision = Literal["mixed", "pure", "fp32", "fp32 weights"]
Metric = Literal["allocated", "reserved", "device", "unstated"]
Quantization = Literal["none", "nf4", "nf4 twice", "gptq", "gptq 8", "int8"]
Text = dict[str, str]
"""A row by column, in lower case."""


class NotKnown(Exception):
    """A value that nothing here knows."""

    def __init__(self, column: str, value: str) -> None:
        super().__init__(column, value)
        self.column, self.value = column, value


_CHECKPOINTING = (
    (r"^(no|none|false|off|disabled|without)\b", False),
    (r"^(yes|full|true|on|enabled|recompute|offload|unsloth|(non-)?reentrant)\b", True),
    (r"^(enable_activation|gradient|activation)_checkpointing\b", True),
)
_ATTENTION = (
    (r"^(no|none|false|eager)\b", True),
    (r"flash|fa-?[234]|sdpa|yes|true|varlen|xformers|fmha", False),
)
_TASKS = ((r"sft|finetun|fine-tun|pretrain|\blm\b|cpt", True), (r"trainer only|dpo", True))


def _choice(text: Text, column: str, known: tuple[tuple[str, bool], ...]) -> bool:
    for pattern, value in known:
        if re.search(pattern, text[column]):
            return value
    raise NotKnown(column, text[column])


def checkpointed(text: Text) -> bool:
    """Whole layers are; which of a layer's results a selective kind keeps differs by project."""
    return _choice(text, "grad_ckpt", _CHECKPOINTING)


def eager(text: Text) -> bool:
    """Whether attention writes its scores out."""
    return _choice(text, "flash_attn", _ATTENTION)


def task(text: Text) -> bool:
    """Only jobs with one trained model are modelled (and DPO's frozen one)."""
    return _choice(text, "task", _TASKS)


def shape(name: str) -> ModelShape:
    """A known model, also where its organisation, `-hf` or `Meta-` are left out."""
    found = [known for known in known_models() if _bare(known) == _bare(name)]
    if not found:
        raise NotKnown("model", name)
    return read_shape(found[0])


def _bare(name: str) -> str:
    last = name.lower().rpartition("/")[2].removeprefix("meta-").removesuffix("-hf")
    return re.sub(r"[ ._-]+|(?<=[a-z])(?=\d)", "-", last)


def capacity(gpu: str) -> int | None:
    """Bytes of a card; None where it is not known."""
    try:
        return find_card(gpu).usable_bytes
    except ConfigError:
        return None


def integer(raw: Text, column: str) -> int:
    """A count, above 0; `4k` is 4,096."""
    found = re.fullmatch(r"(\d+)(k?)", raw[column].replace(",", "").lower())
    if not found or int(found[1]) == 0:
        raise NotKnown(column, raw[column])
    return int(found[1]) * (1024 if found[2] else 1)


def strategy(text: Text) -> Strategy:
    """How states are divided."""
    value = text["strategy"]
    if re.search(r"\bfsdp2?\b", value):  # before ZeRO, which it is often likened to
        return "fsdp"
    if match := re.search(r"(?:zero[- _]?(?:stage)?|stage|ds_z)[- _]?([123])(?!\d)", value):
        stages: dict[str, Strategy] = {"1": "zero1", "2": "zero2", "3": "zero3"}
        return stages[match[1]]
    if re.search(r"\bddp\b|data parallel", value):
        return "ddp"
    if re.search(r"single|^none$|^1 ?gpu", value):
        return "single"
    raise NotKnown("strategy", value)


def offloads(text: Text, what: str) -> bool:
    """Whether anything of that name is."""
    value = re.sub(r"\(.*?\)", "", text["offload"])  # by what means
    known = r"optim\w*|param\w*|weights?|states?|activations?|cpu|to|and|none|no|false"
    if not re.fullmatch(rf"(({known})\W*)*", value):
        raise NotKnown("offload", text["offload"])
    return bool(re.search(what, value))


_TARGETS = {  # as PEFT, LitGPT and torchtune name them
    "query": ("q_proj",),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "projection": ("o_proj", "dense"),
    "output_proj": ("o_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2"),
}


def targets(text: Text) -> tuple[str, ...]:
    """Last parts of the names of adapted linears, or all-linear."""
    words = re.findall(r"\w+", text["peft"])
    named = [_TARGETS.get(word, (word,)) for word in words if _is_target(word)]
    return tuple(name for group in named for name in group) or ("all-linear",)


def _is_target(word: str) -> bool:
    return word in _TARGETS or bool(re.fullmatch(r"\w+_proj|c_attn", word))


def quantization(text: Text) -> Quantization:
    """Of the linears' weights."""
    value = f"{text['peft']} {text['dtype']}"
    if "gptq" in value:
        return "gptq 8" if re.search(r"int8|8-?bit", value) else "gptq"
    if re.search(r"nf4-dq|double quant", value):
        return "nf4 twice"
    if re.search(r"nf4|4-?bit|int4|qlora", value):
        return "nf4"
    return "int8" if re.search(r"\bint8\b|\b8-?bit weights|llm\.int8", value) else "none"


def precision(text: Text, divided: Strategy) -> Precision:
    """Of weights and states."""
    value = text["dtype"]
    if "float8" in value or "fp8" in value:
        raise NotKnown("dtype", value)
    if re.search(r"b?f(?:p|loat)?16 (?:weights|params).*fp32 (?:master|optim)", value):
        return "mixed"
    if re.search(r"pure|-true|no autocast|\bb?f(?:loat|p)?16 (?:weights|params)", value) or (
        "torchtune" in text["source"] and re.fullmatch(r"bf16", value)
    ):
        return "pure"
    if re.search(r"(fp|float)32 (?:params|weights|master)", value):
        return "fp32 weights"
    if re.search(r"\bb?f(?:loat|p)?16\b|amp|mixed|4-?bit|nf4|int[48]", value):
        return "fp32 weights" if divided == "fsdp" and not text["peft"].count("lora") else "mixed"
    if re.fullmatch(r"(fp|float)32|tf32", value):
        return "fp32"
    raise NotKnown("dtype", value)


def prepared(text: Text, divided: Strategy) -> bool:
    """Whether PEFT's preparation for training in 4 or 8 bits was done: it is where nothing else is
    said. What FSDP divides has one dtype, and so stays as it was."""
    if quantization(text) == "none" or divided == "fsdp":
        return False
    if re.search(r"prepares the model", text["notes"]):
        return True
    return precision(text, divided) != "pure" and "without peft's prep" not in text["notes"]


def moments(text: Text) -> float:
    """Bytes per parameter of states in fp32, or in 8 bits. Paged states are managed memory, which
    torch does not count."""
    value = text["optimizer"]
    if re.search(r"galore|apollo|badam|adam-?mini|lomo|4-?bit", value):
        raise NotKnown("optimizer", value)
    if "paged" in value and metric(text["notes"]) in ("allocated", "reserved"):
        return 0.0
    kinds = (("adam", 8.0), ("lion", 4.0), ("adafactor", 0.02), ("sgd", 0.0))
    for name, each in kinds:
        if name in value:
            return each / 4 if re.search(r"8-?bit", value) else each
    raise NotKnown("optimizer", value)


def chunk(text: Text) -> int | None:
    """Rows of logits at once; None: all."""
    notes = text["notes"]
    if match := re.search(r"chunked (?:lm )?head \((\d+)\)|chunk(?:s of| size)? ?=? ?(\d+)", notes):
        return int(match[1] or match[2])
    if re.search(r"liger|fused (?:linear )?cross|cut cross|fused (?:chunked )?(?:lm )?head", notes):
        return 1024
    return None


def peak(text: Text) -> float | None:
    """Bytes: GiB and MiB only where it or the notes say so. None: it ran out."""
    value = text["reported_peak_gb_per_gpu"]
    if re.search(r"oom|out of memory", value):
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(gib|gb|g|mib)?", value)
    if not found:
        raise NotKnown("reported_peak_gb_per_gpu", value)
    said = found[2] or next(iter(re.findall(r"\b(gib|mib)\b", text["notes"])), "gb")
    return float(found[1]) * {"gib": 2**30, "mib": 2**20}.get(said, 1e9)


def metric(notes: str) -> Metric:
    """What was read. Active memory is what is allocated, and what is freed as soon as another
    stream is done with it."""
    if re.search(r"reserved", notes):
        return "reserved"
    if re.search(r"allocated|memory active|log_peak_memory_stats", notes):
        return "allocated"
    return "device" if re.search(r"nvidia-smi|nvml|device[- ]used", notes) else "unstated"
