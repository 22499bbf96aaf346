"""Rollouts by vLLM: one asynchronous engine, with its own processes."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.config.engine import ADAPTER_FILE, ALL_LINEAR
from plimsoll.config.rollout import SamplingConfig
from plimsoll.errors import ConfigError, PlimsollError, WeightSyncError
from plimsoll.machine.faults import await_fault_point, fault_value
from plimsoll.machine.host import thread_wait_settings
from plimsoll.machine.nvidia import card_order, complete_uuids, live_cards
from plimsoll.machine.processes import child_processes, read_host
from plimsoll.model.adapters import WEIGHTS
from plimsoll.records import (
    WEIGHT_VERSIONS,
    ExpertNumbers,
    ExtractCalls,
    Floats,
    Ints,
    Prompt,
    TokenIds,
    Trajectory,
    as_experts,
    single_turn,
)
from plimsoll.run.output import matches_from_the_end
from plimsoll.run.readings import CardReading, Reading
from plimsoll.sampler.protocol import (
    CACHED_TOKENS,
    ENGINE_ENDED,
    PROMPT_TOKENS,
    EngineSpec,
    Request,
    RolloutBuild,
)
from plimsoll.sampler.text import Decoder
from plimsoll.sampler.vllm.config import vllm_of
from plimsoll.sampler.vllm.routing import routing_of
from plimsoll.sampler.vllm.sampler import batch_on_card
from plimsoll.shapes.known_models import find_shape, read_shape
from plimsoll.sync.channel import Channel
from plimsoll.trainer.process_group import kernel_limits
from plimsoll.trainer.weights import AdapterFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOGGED = re.compile(r"\(\w[^)]*\) ERROR [^\]]*\] ((?:\w+\.)*\w*(?:Error|Exception): .+)")
_POINTS_ELSEWHERE = re.compile(r"EngineDeadError|[Ss]ee (?:stack trace|root cause)")
_WATCH_SECONDS = 0.5
_SOCKETS = "VLLM_RPC_BASE_PATH"


def environment(spec: EngineSpec) -> dict[str, str]:
    """Return environment variables for vLLM, to be set before its process starts."""
    common = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **thread_wait_settings(),
    }
    if spec.device == "cuda":
        # FlashInfer's sampler serves no seeds and no processed log-probs: not worth compiling.
        return common | card_order() | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(spec.threads)}
    cpu |= kernel_limits()
    if spec.rollout.parts == 1:
        # Keep the model in the engine's own process. vLLM would start a second one, which takes as
        # long again, only to bind its threads to cores; our threads are not bound.
        cpu |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return common | cpu


def prepare() -> None:
    """Import vLLM, which takes seconds and makes no CUDA context."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if "-" in visible.removeprefix("-"):  # vLLM asks NVML for UUIDs, as they stand there
        os.environ["CUDA_VISIBLE_DEVICES"] = complete_uuids(live_cards(), visible)
    import vllm.v1.engine.async_llm  # noqa: F401


class VllmEngine:
    """A `RolloutEngine` on vLLM's AsyncLLM."""

    responses_per_request = 1

    def __init__(self, spec: EngineSpec) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._spec = spec
        self._version = 0
        self._requests = 0
        self._asleep = False
        self._running = asyncio.Event()
        self._running.set()
        self._adapter: Any = None
        sampled = spec.rollout.routing == "sampled"
        self._experts = find_shape(spec.model).experts if sampled else 0
        self._records = sampled and spec.device == "cpu"
        self._decoder = Decoder(spec.model, spec.trust_remote_code)
        # vLLM never removes the sockets between its processes.
        self._sockets = tempfile.TemporaryDirectory(prefix="vllm-", dir=os.environ.get(_SOCKETS))
        os.environ[_SOCKETS] = self._sockets.name
        self._llm: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**_arguments(spec)))
        self._children = child_processes()
        self._loop = asyncio.get_running_loop()

    async def generate(self, request: Request) -> list[Trajectory]:
        """Return all responses of a request, whose prompts are sampled concurrently."""
        await self._running.wait()
        step = self._version + 1
        await await_fault_point("engine.request", step)
        prompts = zip(request.prompts, request.most_tokens(), request.seeds(), strict=True)
        numbers = range(request.responses)
        calls = [self._answer(*p, number, request.sampling) for p in prompts for number in numbers]
        return fault_value("engine.answer", await asyncio.gather(*calls), step)

    async def _answer(
        self, prompt: Prompt, most: int, seed: int, number: int, sampling: SamplingConfig
    ) -> Trajectory:
        version = self._version
        params = _sampling_params(sampling, self._decoder, most, seed + number)
        output = await self._run(prompt.tokens, params)
        [completion] = output.outputs
        tokens = np.asarray(completion.token_ids, dtype=np.int32)
        sampled = single_turn(
            prompt=prompt,
            sample_index=number,
            response_tokens=tokens,
            sampler_logprobs=_token_logprobs(completion.logprobs, tokens),
            response_text=self._decoder.text(tokens, sampling),
            finish_reason="length" if completion.finish_reason == "length" else "stop",
            weight_version=version,
        )
        versions = {WEIGHT_VERSIONS: _label_tokens(completion, sampled.weight_versions)}
        cached = output.num_cached_tokens or 0
        figures = {PROMPT_TOKENS: float(len(output.prompt_token_ids)), CACHED_TOKENS: float(cached)}
        routing = self._routing(output)
        return replace(sampled, figures=figures, routing=routing).add_columns(versions)

    def _routing(self, output: Any) -> ExpertNumbers | None:
        """Return the experts that the engine took, [tokens but the last, layers, k]; else None."""
        [completion], experts = output.outputs, self._experts
        if not experts:
            return None
        tokens = len(output.prompt_token_ids) + len(completion.token_ids) - 1
        return as_experts(completion.routed_experts[:tokens], experts)

    async def log_probs(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Return the log-prob of every token but the first, one array per sequence."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, flat_logprobs=True
        )
        outputs = await asyncio.gather(*(self._run(tokens, params) for tokens in sequences))
        return [
            _token_logprobs(output.prompt_logprobs, tokens[1:])  # nothing predicts the first
            for output, tokens in zip(outputs, sequences, strict=True)
        ]

    async def _run(self, tokens: TokenIds, params: Any) -> Any:
        self._requests += 1
        prompt: dict[str, Any] = {"prompt_token_ids": tokens.tolist()}
        if self._spec.rollout.staleness:  # requests share prefixes of one version only
            prompt["cache_salt"] = str(self._version)
        number, adapter = str(self._requests), self._adapter
        if self._records:
            await self._rpc("plimsoll_record_routing")
            params.skip_reading_prefix_cache = True  # cached tokens are not computed again
        answers = self._llm.generate(prompt, params, request_id=number, lora_request=adapter)
        outputs = [output async for output in answers]
        if not outputs:
            raise PlimsollError(f"rollout engine {self._spec.index}: vLLM gave no output")
        if self._records:
            taken, *_ = await self._llm.collective_rpc("plimsoll_take_routing", args=(number,))
            outputs[-1].outputs[0].routed_experts = routing_of(taken)
        return outputs[-1]

    async def sleep(self) -> None:
        """Sleep at the configured level, if any."""
        vllm = vllm_of(self._spec.rollout)
        if vllm.sleeps:
            await self._llm.sleep(vllm.sleep_level)
            self._asleep = True

    async def _wake(self, tags: list[str] | None = None) -> None:
        try:
            await self._llm.wake_up(tags)
        except Exception as error:
            if self._llm.errored:
                raise
            # RuntimeError, as torch raises it: most likely the card is full; only the text says so.
            raise RuntimeError(str(error)) from error

    async def cards(self) -> list[str]:
        """Return the name of the card of each of vLLM's workers."""
        return [*await self._llm.collective_rpc("plimsoll_card_name")]

    async def begin_sync(self, names: tuple[str, ...], channels: Sequence[Channel]) -> None:
        """Wake the weights of a sleeping engine, and announce the tensors to its workers."""
        if self._asleep:
            await self._wake(["weights"])
        ways = [list(astuple(channel)) for channel in channels]
        await self._rpc("plimsoll_begin", list(names), ways, self._spec.first_process)

    async def receive(self) -> None:
        """Have the workers take the next bucket."""
        await self._rpc("plimsoll_receive")

    async def end_receiving(self) -> None:
        """Have the workers put the new weights in their places."""
        await self._rpc("plimsoll_finish")

    async def finish_sync(self, version: int) -> None:
        """Wake the KV cache, forget cached prefixes, and count the version."""
        if self._asleep:
            await self._wake(["kv_cache"])
            self._asleep = False
        await self._forget_prefixes()
        self._version = version

    async def pause(self) -> None:
        """Freeze vLLM's requests, which keep their KV cache, and let new ones wait."""
        self._running.clear()
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Let vLLM sample on, and label further tokens with the version of the weights."""
        if hasattr(self._llm, "update_weight_version"):
            await self._llm.update_weight_version(str(self._version))
        await self._llm.resume_generation()
        self._running.set()

    async def _forget_prefixes(self) -> None:
        if self._spec.rollout.staleness:  # paused requests hold them, and no new one finds them
            return
        if not await self._llm.reset_prefix_cache():
            raise WeightSyncError(
                f"rollout engine {self._spec.index}: the prefix cache could not be reset, because "
                "requests are still running; cached prefixes would keep the old weights' keys"
            )

    async def _rpc(self, method: str, *arguments: object) -> None:
        with self._refusals():
            await self._llm.collective_rpc(method, args=arguments)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn errors in the block that vLLM survives into WeightSyncError, naming the engine."""
        try:
            yield
        except Exception as error:
            if self._llm.errored:
                raise
            raise WeightSyncError(f"rollout engine {self._spec.index}: {error}") from error

    async def read_memory(self) -> Reading:
        """Return the memory of the engine's processes, and the reading of its fullest card."""
        host = read_host(self._children)
        if self._spec.device == "cpu":
            return Reading(host)
        # Reading a card in this process would make one more CUDA context on the card.
        cards = await self._llm.collective_rpc("plimsoll_read_card")
        readings = [CardReading(*numbers) for numbers in cards]
        return Reading(host, max(readings, key=lambda card: card.peak_used))

    async def take_adapter(self, files: AdapterFiles) -> int:
        """Sample with this adapter, not the last one, from now on; return the adapter's bytes."""
        from vllm.lora.request import LoRARequest

        if self._asleep:
            await self._wake()
            self._asleep = False
        with tempfile.TemporaryDirectory(dir=_shared_memory(len(files.weights))) as directory:
            Path(directory, ADAPTER_FILE).write_bytes(files.config)
            Path(directory, WEIGHTS).write_bytes(files.weights)
            # vLLM counts adapters from 1, versions begin with 0.
            new = LoRARequest(f"version {files.version}", files.version + 1, directory)
            with self._refusals():
                taken = await self._llm.add_lora(new)
        if not taken:
            raise WeightSyncError(f"rollout engine {self._spec.index}: vLLM took no adapter")
        if self._adapter is not None and self._adapter.lora_int_id != new.lora_int_id:
            await self._llm.remove_lora(self._adapter.lora_int_id)
        self._adapter = new
        await self._forget_prefixes()
        self._version = files.version
        return len(files.weights)

    async def watch(self) -> str:
        """Wait until vLLM's processes have died; return the reason."""
        llm = self._llm
        while not llm.errored:
            await asyncio.sleep(_WATCH_SECONDS)
        return ENGINE_ENDED

    async def answer(self) -> None:
        """Wait until vLLM's core has answered."""
        sleeping = asyncio.run_coroutine_threadsafe(self._llm.is_sleeping(), self._loop)
        await asyncio.wrap_future(sleeping)

    async def stop(self) -> None:
        """End vLLM and its processes."""
        self._llm.shutdown()
        self._sockets.cleanup()
        del os.environ[_SOCKETS]
        del self._llm  # which shuts down once more when it goes: too late at the interpreter's end


def _arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments of vLLM's engine.

    `rollout.vllm.arguments` replace Plimsoll's defaults. Arguments that Plimsoll always sets
    replace both.
    """
    on_gpu, rollout, vllm = spec.device == "cuda", spec.rollout, vllm_of(spec.rollout)
    returns_routing = rollout.routing == "sampled"
    defaults: dict[str, Any] = {
        # Within Ray's placement groups vLLM would start its workers as actors, which find no card.
        "distributed_executor_backend": "mp" if rollout.parts > 1 else None,
        "enforce_eager": not on_gpu,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    if on_gpu:
        defaults["max_num_batched_tokens"] = batch_on_card(find_shape(spec.model), rollout)
    return {
        **defaults,
        **vllm.arguments,
        "model": spec.model,
        "dtype": rollout.dtype,
        "max_model_len": spec.max_tokens,
        "max_num_seqs": rollout.max_sequences,
        "tensor_parallel_size": vllm.tensor_parallel,
        "pipeline_parallel_size": vllm.pipeline_parallel,
        "gpu_memory_utilization": vllm.memory_share,
        "kv_cache_memory_bytes": None if on_gpu else int(vllm.cpu_kv_cache_gib * 2**30),
        "enable_sleep_mode": vllm.sleeps,
        **({"enable_return_routed_experts": True} if on_gpu and returns_routing else {}),
        # vLLM rewinds the seeded generator of a prompt that is prefilled in parts, which CPU
        # generators cannot.
        "enable_chunked_prefill": on_gpu,
        # Log-probs of the distribution that was sampled from.
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": "plimsoll.sampler.vllm.receiver.WeightReceiver",
        "trust_remote_code": spec.trust_remote_code,
        "load_format": "safetensors",  # vLLM's own choice would read pickles (*.bin, *.pt), too
        **_adapter_settings(spec),
    }


def _adapter_settings(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments that make room for one adapter, on the layers that it has.

    With room on the output head, vLLM's own choice in models such as Llama's, vLLM 0.32 cannot
    score a prompt: it has an adapter for each sequence there, not for each token.
    """
    if spec.adapter_rank is None:
        return {}
    room = {"enable_lora": True, "max_lora_rank": spec.adapter_rank, "max_loras": 1}
    layers = {*spec.adapter_targets}
    if ALL_LINEAR in layers:
        try:
            linears = read_shape(spec.model).linears
        except ConfigError:  # a family whose layers are not known here: vLLM chooses
            return room | {"lora_target_modules": None}
        layers |= {linear.name for linear in linears if linear.stacked == 1}
    return room | {"lora_target_modules": sorted(layers - {ALL_LINEAR})}


def _label_tokens(completion: Any, versions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return each token's version: that of its span where vLLM has a label from `resume`.

    vLLM 0.26 has no labels, and needs none: there no response goes on across a sync (rules.py).
    """
    labelled = versions.copy()
    for span in getattr(completion, "weight_versions", None) or ():
        if span.version.isdecimal():  # vLLM's own first label is a word
            labelled[span.start : span.end] = int(span.version)
    return labelled


def _sampling_params(sampling: SamplingConfig, decoder: Decoder, most: int, seed: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ending = decoder.ending(sampling)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        min_tokens=min(sampling.min_new_tokens, most),
        max_tokens=most,
        logprobs=0,
        flat_logprobs=True,
        seed=seed,
        stop_token_ids=list(ending.tokens),
        stop=list(ending.strings),
        detokenize=bool(ending.strings),
        skip_special_tokens=not ending.shows_special,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _token_logprobs(logprobs: Any, tokens: TokenIds) -> Floats:
    """Return the log-prob of each token, shape [n].

    Args:
        logprobs: vLLM's `FlatLogprobs` of these tokens, with one entry a token, because no other
            tokens' log-probs were requested. vLLM's usual form would make a dictionary and an
            object a token, in the one thread that also feeds the engine.
        tokens: shape [n].
    """
    assert np.array_equal(logprobs.token_ids, tokens), "vLLM's log-probs are of other tokens"
    return np.asarray(logprobs.logprobs, dtype=np.float32)


def _shared_memory(size: int) -> str | None:
    """Return a folder in memory with room for the bytes; None: the usual temporary folder."""
    memory = "/dev/shm"
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * size:
        return memory
    return None


def memory_settings(spec: EngineSpec) -> str:
    """Return the settings that decide whether vLLM can start, as `key: value, ...` for people."""
    vllm = vllm_of(spec.rollout)
    key = "memory_share" if spec.device == "cuda" else "cpu_kv_cache_gib"
    keys = (key, "max_sequences", "tensor_parallel", "pipeline_parallel")
    return ", ".join(f"rollout.vllm.{key}: {getattr(vllm, key)}" for key in keys)


def logged_error(log: str) -> str | None:
    """Return the last exception that vLLM logged, or None; skip those that point to another."""
    lines = matches_from_the_end(f"{log}.out", _LOGGED)
    return next((line for line in lines if not _POINTS_ELSEWHERE.search(line)), None)


def calls_of(name: str, tokenizer: PreTrainedTokenizerBase) -> ExtractCalls:
    """Return a function that extracts tool calls, with vLLM's parser of their format."""
    from plimsoll.sampler.vllm.tools import vllm_extract  # vLLM takes seconds

    return vllm_extract(name, tokenizer)


ENGINE = RolloutBuild(
    start=VllmEngine,
    environment=environment,
    memory_settings=memory_settings,
    logged_error=logged_error,
    calls_of=calls_of,
    prepare=prepare,
)
