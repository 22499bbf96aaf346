"""What samples: vLLM beside or on the ranks' cards, or transformers."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Outcome, Remark
from plimsoll.convert.trl.roles import processes

_OF_VLLM = (
    "vllm_mode",
    "vllm_enable_sleep_mode",
    "vllm_gpu_memory_utilization",
    "vllm_tensor_parallel_size",
)


def engines(o: Options) -> Iterator[Outcome]:
    mode, sleep, share, parallel = _OF_VLLM
    if not o["use_vllm"]:
        yield o.entry("rollout.engine", "transformers", "use_vllm")
        yield o.entry("rollout.placement", "shared", "use_vllm")
        yield from o.idle("--use_vllm is not given", *_OF_VLLM)
        return
    yield o.entry("rollout.engine", "vllm", "use_vllm")
    if o[mode] == "server":
        yield o.entry("rollout.placement", "own", mode)
        why = "the server's cards are engines of Plimsoll's: set rollout.engines and "
        yield Remark("check", "rollout.engines", f"{why}rollout.tensor_parallel as it was started")
        yield from o.idle("the server says it", sleep, share, parallel)
        return
    width = int(o[parallel])
    yield o.entry("rollout.placement", "shared", mode, "use_vllm")
    note = f"{processes(o)} processes / {width}"
    yield o.entry("rollout.engines", max(1, processes(o) // width), parallel, note=note)
    yield o.entry("rollout.tensor_parallel", width, parallel)
    yield o.entry("rollout.memory_share", o[share], share)
    yield o.entry("rollout.sleep_level", 2 if o[sleep] else 0, sleep)  # syncs bring all
