"""vLLM is given more prompt tokens at once than it prefills in one go."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from plimsoll.commands.arithmetic import ALPHABET, make_tokenizer
from plimsoll.config.rollout import RolloutConfig, SamplingConfig
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.records import Prompt, Trajectory
from plimsoll.rollout.protocol import EngineSpec, Request
from plimsoll.rollout.vllm import VllmEngine, environment

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 100, 100, 4

pytestmark = pytest.mark.slow


async def sampled(spec: EngineSpec, request: Request, times: int) -> list[list[Trajectory]]:
    engine = VllmEngine(spec)
    try:
        return [await engine.generate(request) for _ in range(times)]
    finally:
        await engine.stop()


def test_prompts_beyond_one_prefill_are_sampled_with_their_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("qwen2", True, vocab=len(ALPHABET) + 1, hidden=128, layers=1)
    write_tiny_model(tmp_path / "model", config, 0, make_tokenizer())
    rollout = RolloutConfig(cpu_kv_cache_gib=0.25)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    spec = EngineSpec(0, str(tmp_path / "model"), PROMPT_TOKENS + NEW_TOKENS, 2, device, rollout)
    for name, value in environment(spec).items():
        monkeypatch.setitem(os.environ, name, value)
    rng = np.random.default_rng(0)
    prompts = tuple(
        Prompt(i, rng.integers(len(ALPHABET), size=PROMPT_TOKENS), "") for i in range(PROMPTS)
    )
    request = Request(prompts, 1, SamplingConfig(max_new_tokens=NEW_TOKENS), seed=3)
    with tempfile.TemporaryDirectory() as folder:  # a socket's path has to be short
        monkeypatch.setattr(tempfile, "tempdir", folder)
        first, second = asyncio.run(sampled(spec, request, 2))
        assert not [path for path in Path(folder).rglob("*") if path.is_socket()]
    assert not [x for x in gc.get_objects() if type(x).__name__ == "AsyncLLM"]  # it is closed
    assert [t.prompt.index for t in first] == list(range(PROMPTS))
    assert all(1 <= len(t.response_tokens) <= NEW_TOKENS for t in first)
    assert len({tuple(t.response_tokens) for t in first}) > PROMPTS // 2
    pairs = zip(first, second, strict=True)
    same = [np.array_equal(a.response_tokens, b.response_tokens) for a, b in pairs]
    assert sum(same) >= 0.9 * PROMPTS  # the second time prefixes are cached: other rounding
