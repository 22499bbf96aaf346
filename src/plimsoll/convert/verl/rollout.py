"""Engines: those of verl share the ranks' cards."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Entry, Outcome, Remark
from plimsoll.convert.verl.roles import cards
from plimsoll.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"


def engines(o: Options) -> Iterator[Outcome]:
    name, width, share, free, dtype = (
        f"{_ROLLOUT}.{part}"
        for part in (
            "name",
            "tensor_model_parallel_size",
            "gpu_memory_utilization",
            "free_cache_engine",
            "dtype",
        )
    )
    if o[name] == "hf":
        yield o.entry("rollout.engine", "transformers", name)
        yield Entry("rollout.placement", "shared", note="it samples on the ranks' cards")
        yield from o.idle("there are no engines", width, share, free, dtype)
        return
    number, across = cards(o), o[width] * (o[f"{_ROLLOUT}.pipeline_model_parallel_size"] or 1)
    if across > number:
        raise ConfigError(
            f"{o.shown(width)}: an engine needs {across} cards, and there are {number} "
            f"({o.shown('trainer.n_gpus_per_node')} {o.shown('trainer.nnodes')})."
        )
    note = "" if o[name] == "vllm" else f"not {o[name]}"
    yield o.entry("rollout.engine", "vllm", name, note=note)
    if number % across:
        yield Remark("check", "rollout.engines", f"{across} cards each: {number % across} are left")
    yield o.entry("rollout.engines", number // across, width, note=f"{number} cards / {across}")
    yield o.entry("rollout.tensor_parallel", o[width], width)
    yield o.entry("rollout.memory_share", o[share], share)
    yield Entry("rollout.placement", "shared", note="verl's engines share the ranks' cards")
    yield o.entry("rollout.sleep_level", 2 if o[free] else 0, free)  # syncs bring all weights
    if str(o[dtype]) in ("float16", "fp16", "half"):
        yield from o.lacking("engines compute in bfloat16 or float32", dtype)
    else:
        kind = "float32" if str(o[dtype]) in ("float32", "fp32") else "bfloat16"
        yield o.entry("rollout.dtype", kind, dtype)


def options(o: Options) -> Iterator[Outcome]:
    """vLLM's, which have the same names."""
    names = ("enforce_eager", "max_num_batched_tokens")
    for name in names:
        flag = f"{_ROLLOUT}.{name}"
        if o.given(flag) and o[flag] is not None and o[f"{_ROLLOUT}.name"] != "hf":
            yield o.entry(f"rollout.vllm.{name}", o[flag], flag)
        else:
            yield from o.idle("vLLM's own default", flag)
    why = "vLLM's prefix cache is on, and emptied at each weight sync"
    yield from o.same(why, f"{_ROLLOUT}.enable_prefix_caching")
