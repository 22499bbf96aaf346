"""Rollouts by transformers, in the caller's process: for machines without vLLM, and for debugging.

Batched, with a key-value cache; far slower than vLLM.

The attention here is for models with fewer heads of keys than of queries, grouped-query attention
(Ainslie et al. 2023, https://arxiv.org/abs/2305.13245). It is registered with transformers'
AttentionInterface. The attention that transformers has there copies the KV cache for every head of
queries at each token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from plimsoll.config.rollout import SamplingConfig
from plimsoll.errors import WeightSyncError
from plimsoll.machine.faults import await_fault_point, fault_value
from plimsoll.machine.host import thread_wait_settings
from plimsoll.machine.nvidia import card_order
from plimsoll.model.load import quiet
from plimsoll.records import Floats, Ints, Prompt, TokenIds, Trajectory, single_turn
from plimsoll.run.readings import Reading
from plimsoll.sampler.protocol import EngineSpec, Request, RolloutBuild
from plimsoll.sampler.text import Decoder
from plimsoll.sync.buckets import WeightLanding, split_bytes
from plimsoll.sync.channel import Channel, card_name
from plimsoll.trainer.memory import read_memory
from plimsoll.trainer.process_group import kernel_limits, suit_cards
from plimsoll.trainer.weights import AdapterFiles

GROUPED = "plimsoll_grouped"


def _grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention as transformers' `sdpa` computes it, without copies of keys and values.

    Query [sequences, heads, tokens, width], keys and values [sequences, key-value heads, tokens so
    far, width]; the result is [sequences, tokens, heads, width].

    If each sequence has one new token, the token sees all tokens before it, and all heads have the
    same mask. Then the queries of a group can be rows of one head, which share its keys, and
    nothing is copied.
    """
    sequences, heads, tokens, width = query.shape
    groups = key.shape[1]
    if tokens > 1 or heads == groups or options.get("position_bias") is not None:
        inputs = module, query, key, value, attention_mask, dropout, scaling
        whole: tuple[Tensor, None] = sdpa_attention_forward(*inputs, **options)
        return whole
    rows = query.reshape(sequences, groups, heads // groups, width)
    attended = scaled_dot_product_attention(
        rows, key, value, attention_mask, dropout, scale=scaling
    )
    return attended.reshape(sequences, 1, heads, width), None


AttentionInterface.register(GROUPED, _grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


class EndAtLimit(StoppingCriteria):  # type: ignore[misc]
    """A criterion that ends each response at a limit of its own."""

    def __init__(self, limits: Sequence[int], prompt_tokens: int) -> None:
        self._last = torch.tensor(limits) + prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor, **options: object) -> Tensor:
        """Return for each response whether it has reached its limit."""
        return (self._last <= input_ids.shape[1]).to(input_ids.device)


class StopStrings(StoppingCriteria):  # type: ignore[misc]
    """A criterion that ends a response in which a stop string has appeared, as vLLM does.

    The prompt's text, with which transformers' own criterion would join it, does not count.
    """

    def __init__(self, decoder: Decoder, sampling: SamplingConfig, prompt_tokens: int) -> None:
        self._decoder = decoder
        self._sampling = sampling
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor, **options: object) -> Tensor:
        """Return for each response whether it holds a stop string."""
        rows = input_ids[:, self._prompt_tokens :].cpu().numpy()
        stopped = [self._decoder.stops(row, self._sampling) for row in rows]
        return torch.tensor(stopped, device=input_ids.device)


class Recorder(LogitsProcessor):  # type: ignore[misc]
    """A processor that makes the distribution to sample from, and notes sampled tokens' log-probs.

    It sees a step's token only at the next call, so it keeps one step's log-probs at a time.
    """

    def __init__(self, sampling: SamplingConfig, prompt_tokens: int, ends: Tensor) -> None:
        self._processors = _processors(sampling, prompt_tokens, ends)
        self._temperature = sampling.temperature or 1.0
        self._last: Tensor | None = None
        self._noted: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores to sample from, and note the last token's log-prob."""
        self._note(input_ids)
        scores = scores / self._temperature
        for process in self._processors:
            scores = process(input_ids, scores)
        self._last = scores.float().log_softmax(-1)
        return scores

    def _note(self, input_ids: Tensor) -> None:
        if self._last is not None:
            self._noted.append(self._last.gather(1, input_ids[:, -1:]))

    def finish(self, output: Tensor) -> Tensor:
        """Return the log-probs of all sampled tokens, shape [sequences, steps]."""
        self._note(output)
        return torch.cat(self._noted, dim=1)


def _processors(
    sampling: SamplingConfig, prompt_tokens: int, ends: Tensor
) -> list[LogitsProcessor]:
    """Return the processors in vLLM's order (v1/sample/sampler.py).

    In another order they give another distribution.
    """
    processors: list[LogitsProcessor] = []
    if sampling.min_new_tokens and len(ends):
        least = sampling.min_new_tokens
        processors.append(MinNewTokensLengthLogitsProcessor(prompt_tokens, least, ends))
    if sampling.min_p > 0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return processors


class TransformersEngine:
    """A `RolloutEngine` on `generate` of transformers."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._version = 0
        self.responses_per_request = spec.rollout.max_sequences
        self._decoder = Decoder(spec.model, spec.trust_remote_code)
        if spec.device == "cuda":
            suit_cards()
        with quiet():
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                spec.model,
                dtype=getattr(torch, spec.rollout.dtype),
                use_safetensors=True,
                trust_remote_code=spec.trust_remote_code,
            ).to(spec.device)
        self._model.eval().requires_grad_(False)
        if self._model.config._attn_implementation == "sdpa":
            self._model.set_attn_implementation(GROUPED)
        # Not the model's own config: the trainer knows nothing of, say, its repetition penalty.
        self._model.generation_config = GenerationConfig()
        self._landing = WeightLanding(spec.first_process, torch.device(spec.device))
        self._running = asyncio.Event()
        self._running.set()

    async def generate(self, request: Request) -> list[Trajectory]:
        """Return all responses of a request, sampled in one batch."""
        await self._running.wait()
        await await_fault_point("engine.request", self._version + 1)
        sampling = request.sampling
        prompts = request.each_prompt()
        tokens, mask = _pad_left([p.tokens for p in prompts], self._pad_token, self._spec.device)
        limits = [most for most in request.most_tokens() for _ in range(request.responses)]
        ends = self._decoder.ending(sampling).tokens
        recorder = Recorder(sampling, tokens.shape[1], torch.tensor(ends, device=self._spec.device))
        stopping = StoppingCriteriaList()
        if min(limits) < max(limits):
            stopping.append(EndAtLimit(limits, tokens.shape[1]))
        if self._decoder.ending(sampling).strings:
            stopping.append(StopStrings(self._decoder, sampling, tokens.shape[1]))
        # Only the engine's card: torch warns if it has to fork the generators of several cards.
        cards = [torch.cuda.current_device()] if self._spec.device == "cuda" else []
        with torch.random.fork_rng(cards):
            torch.manual_seed(request.seed)
            output = self._model.generate(
                input_ids=tokens,
                attention_mask=mask,
                do_sample=sampling.temperature > 0,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                max_new_tokens=max(limits),
                eos_token_id=list(ends),
                pad_token_id=self._pad_token,
                logits_processor=LogitsProcessorList([recorder]),
                stopping_criteria=stopping,
            )
        responses = output[:, tokens.shape[1] :]
        logprobs = recorder.finish(output)
        trajectories = [
            self._trajectory(
                prompts[i], i % request.responses, responses[i, :most], logprobs[i], sampling
            )
            for i, most in enumerate(limits)
        ]
        return fault_value("engine.answer", trajectories, self._version + 1)

    @property
    def _pad_token(self) -> int:
        return self._decoder.end_tokens[0] if self._decoder.end_tokens else 0

    def _trajectory(
        self, prompt: Prompt, sample: int, row: Tensor, logprobs: Tensor, sampling: SamplingConfig
    ) -> Trajectory:
        tokens = row.cpu().numpy().astype(np.int32)
        length, stopped = self._length(tokens, sampling)
        return single_turn(
            prompt=prompt,
            sample_index=sample,
            response_tokens=tokens[:length],
            sampler_logprobs=logprobs[:length].float().cpu().numpy(),
            response_text=self._decoder.text(tokens[:length], sampling),
            finish_reason="stop" if stopped else "length",
            weight_version=self._version,
        )

    def _length(self, tokens: TokenIds, sampling: SamplingConfig) -> tuple[int, bool]:
        """Return the length of the response, its end included, and whether it ended by itself.

        `generate` pads a response after its end until all have ended; the padding is not counted.
        """
        ending = self._decoder.ending(sampling)
        ends = np.flatnonzero(np.isin(tokens, ending.tokens))
        length = int(ends[0]) + 1 if len(ends) else len(tokens)
        if not ending.strings:
            return length, len(ends) > 0
        first = (n for n in range(1, length + 1) if self._decoder.stops(tokens[:n], sampling))
        stop = next(first, None)
        return stop or length, stop is not None or len(ends) > 0

    async def log_probs(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Return the log-prob of every token but the first, computed one sequence at a time."""
        return [self._sequence_log_probs(tokens) for tokens in sequences]

    def _sequence_log_probs(self, tokens: Ints) -> Floats:
        ids = torch.tensor(tokens, device=self._spec.device)
        with torch.no_grad():
            logits = self._model(input_ids=ids[None]).logits[0, :-1].float()
        log_probs: Floats = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].cpu().numpy()
        return log_probs

    async def sleep(self) -> None:
        """Do nothing: the engine keeps no cache between requests, and its weights stay."""

    async def cards(self) -> list[str]:
        """Return the name of the engine's card."""
        return [card_name(torch.device(self._spec.device))]

    async def begin_sync(self, names: tuple[str, ...], channels: Sequence[Channel]) -> None:
        """Expect these tensors as new weights."""
        self._landing.begin(names, channels)

    async def receive(self) -> None:
        """Copy the next bucket's tensors into the model."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        with self._landing.bucket() as (bucket, data):
            for name, piece in split_bytes(bucket.tensors, data).items():
                if name not in parameters:
                    raise WeightSyncError(f"the rollout model has no tensor {name}")
                parameters[name].data.copy_(piece)

    async def end_receiving(self) -> None:
        """Check that all tensors came, and let go of the sender's memory."""
        self._landing.complete()
        self._landing.close()

    async def finish_sync(self, version: int) -> None:
        """Count the version."""
        self._version = version

    async def pause(self) -> None:
        """Let further requests wait; a request that has begun has ended by now."""
        self._running.clear()

    async def resume(self) -> None:
        """Let requests begin."""
        self._running.set()

    async def read_memory(self) -> Reading:
        """Return the memory of this process, and its peaks since the last call."""
        return read_memory(torch.device(self._spec.device))

    async def take_adapter(self, files: AdapterFiles) -> int:
        """Raise NotImplementedError: only merged weights are taken."""
        raise NotImplementedError("the engine on transformers takes merged weights only")

    async def watch(self) -> str:
        """Wait for ever: the engine has no process that could die."""
        await asyncio.Event().wait()
        return ""

    async def answer(self) -> None:
        """Return at once: the engine has no processes of its own."""

    async def stop(self) -> None:
        """Drop the model."""
        del self._model


def _pad_left(prompts: Sequence[TokenIds], pad: int, device: str) -> tuple[Tensor, Tensor]:
    longest = max(len(p) for p in prompts)
    tokens = torch.full((len(prompts), longest), pad, dtype=torch.long)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        tokens[i, longest - len(prompt) :] = torch.from_numpy(np.ascontiguousarray(prompt))
        mask[i, longest - len(prompt) :] = 1
    return tokens.to(device), mask.to(device)


def environment(spec: EngineSpec) -> dict[str, str]:
    """Return environment variables for torch, to be set before the engine's process starts."""
    common = {"TOKENIZERS_PARALLELISM": "false", **thread_wait_settings()}
    if spec.device == "cuda":
        return common | card_order()
    return common | {"OMP_NUM_THREADS": str(spec.threads)} | kernel_limits()


ENGINE = RolloutBuild(
    start=TransformersEngine,
    environment=environment,
    memory_settings=lambda spec: (
        f"rollout.transformers.max_sequences: {spec.rollout.max_sequences}"
    ),
    logged_error=lambda log: None,
)
