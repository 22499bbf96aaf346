"""What a run leaves loads in vLLM and in transformers with the same log-probs: its model, its
adapter beside the base, and what `plimsoll export --merge` and `plimsoll merge` make of the two.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from commands import SFT, write_config, write_task
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from plimsoll.cli import main
from plimsoll.config.rollout import RolloutConfig
from plimsoll.sampler.protocol import EngineSpec
from plimsoll.sampler.vllm.engine import environment

ROUNDING = 1e-4
"""Nats: what two orders of the same float32 sums differ by."""

Probe = Sequence[list[int]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Full SFT, then an adapter over its model, merged twice."""
    home = tmp_path_factory.mktemp("loads")
    write_task(home)
    full = copy.deepcopy(SFT)
    full["run"] = {"directory": "sft", "steps": 6, "tensorboard": False}
    lora = copy.deepcopy(full)
    lora["run"] |= {"directory": "lora"}
    lora["actor"]["model"]["path"] = "sft/model"
    lora["actor"]["adapter"] = {"rank": 4, "alpha": 16.0}
    write_config(home, "sft", full)
    write_config(home, "lora", lora)
    with chdir(home):
        for words in (
            "sft sft.yaml",
            "sft lora.yaml",
            "export lora --to exported --merge",
            "merge lora/model --out merged --dtype float32",
        ):
            assert main(words.split()) == 0
    return home


@pytest.fixture(scope="module")
def probe(home: Path) -> Probe:
    """Whole rows of the task, as tokens."""
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    rows = [json.loads(line) for line in (home / "rows.jsonl").read_text().splitlines()]
    return [tokenizer.encode(row["prompt"] + row["response"]) for row in rows]


def in_transformers(model: Any, probe: Probe) -> list[float]:
    found: list[float] = []
    for tokens in probe:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, :-1].float()
        found += logits.log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0].tolist()
    return found


@contextmanager
def vllm_engine(model: Path, **settings: Any) -> Iterator[Any]:
    """vLLM as its own documents start it, in this process."""
    spec = EngineSpec(0, str(model), 64, 1, "cpu", RolloutConfig(dtype="bfloat16"))
    with patch.dict(os.environ, environment(spec)):
        from vllm import LLM

        engine = LLM(
            str(model),
            dtype="float32",
            max_model_len=64,
            kv_cache_memory_bytes=2**26,
            enforce_eager=True,
            **settings,
        )
        yield engine
        engine.llm_engine.engine_core.shutdown()


def in_vllm(engine: Any, probe: Probe, adapter: Path | None = None) -> list[float]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    request = None if adapter is None else LoRARequest("mine", 1, str(adapter))
    prompts = [{"prompt_token_ids": tokens} for tokens in probe]
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = engine.generate(prompts, sampling, lora_request=request, use_tqdm=False)
    return [
        position[token].logprob
        for tokens, output in zip(probe, found, strict=True)
        for token, position in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
    ]


def plain(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def apart(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.engine
@pytest.mark.slow
def test_a_model_and_an_adapter_beside_it_give_the_same_log_probs(home: Path, probe: Probe) -> None:
    base, adapter = home / "sft" / "model", home / "lora" / "model"
    with vllm_engine(base, enable_lora=True, max_lora_rank=8) as engine:
        alone, adapted = in_vllm(engine, probe), in_vllm(engine, probe, adapter)
    assert apart(alone, in_transformers(plain(base), probe)) < ROUNDING
    with_adapter = PeftModel.from_pretrained(plain(base), adapter).eval()
    assert apart(adapted, in_transformers(with_adapter, probe)) < ROUNDING
    assert apart(alone, adapted) > 100 * ROUNDING


def test_a_merged_adapter_gives_the_log_probs_of_the_adapter(home: Path, probe: Probe) -> None:
    exported, merged = (load_file(home / d / "model.safetensors") for d in ("exported", "merged"))
    assert exported.keys() == merged.keys()
    assert all(torch.equal(exported[name], merged[name]) for name in exported)
    base = plain(home / "sft" / "model")
    with_adapter = PeftModel.from_pretrained(base, home / "lora" / "model").eval()
    wanted = in_transformers(with_adapter, probe)
    assert apart(in_transformers(plain(home / "exported"), probe), wanted) < ROUNDING


@pytest.mark.engine
@pytest.mark.slow
def test_a_merged_adapter_gives_them_in_vllm_too(home: Path, probe: Probe) -> None:
    wanted = in_transformers(plain(home / "exported"), probe)
    with vllm_engine(home / "exported") as engine:
        assert apart(in_vllm(engine, probe), wanted) < ROUNDING
