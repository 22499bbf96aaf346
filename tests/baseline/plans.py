"""Plans: of every config of the examples and pages on several machines, of many models and cards,
and of every lever."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from calls import Call
from configs import JOBS, QWEN, changed, smallest, text

_BLOCK = re.compile(rf"```ya?ml\n(# (?:{'|'.join(JOBS)})\b.*?)```", re.DOTALL)
_NO_SHAPE = re.compile(r"(path: )(?:models|runs)/[\w/.-]+(?=[,}])")

_MACHINES: Mapping[str, tuple[str, ...]] = {
    "as-written": (),
    "8xA100": ("--cluster", "8xA100-80GB", "--host-memory", "1TB"),
    "1x4090": ("--cluster", "1xRTX4090", "--host-memory", "64GB"),
    "4x4090": ("--cluster", "4xRTX4090", "--host-memory", "256GiB"),
    "2-nodes": ("--cluster", "8xH100-80GB", "--nodes", "2", "--host-memory", "2TB"),
    "no-host-memory": ("--cluster", "8xA100-80GB"),
    "cpu": ("--cluster", "cpu", "--host-memory", "64GB"),
}
_ANYWHERE = ("--cluster", "cpu", "--host-memory", "32GB")
"""Where a config names no hardware, instead of the machine at hand."""

_MODELS = """
meta-llama/Llama-2-7b-hf TinyLlama/TinyLlama-1.1B-Chat-v1.0 meta-llama/Llama-2-13b-hf
openlm-research/open_llama_3b huggyllama/llama-30b huggyllama/llama-65b meta-llama/Llama-2-70b-hf
meta-llama/Meta-Llama-3-8B meta-llama/Meta-Llama-3-70B meta-llama/Llama-3.2-1B
meta-llama/Llama-3.2-3B codellama/CodeLlama-7b-hf codellama/CodeLlama-7b-Python-hf
codellama/CodeLlama-13b-hf codellama/CodeLlama-13b-Python-hf codellama/CodeLlama-34b-hf
codellama/CodeLlama-70b-hf HuggingFaceTB/SmolLM2-135M HuggingFaceTB/SmolLM2-360M
HuggingFaceTB/SmolLM2-1.7B 01-ai/Yi-6B 01-ai/Yi-9B 01-ai/Yi-34B mistralai/Mistral-7B-v0.1
mistralai/Mistral-7B-Instruct-v0.2 mistralai/Mistral-7B-v0.3 mistralai/Mixtral-8x7B-v0.1
Qwen/Qwen-1_8B Qwen/Qwen-7B Qwen/Qwen-14B Qwen/Qwen-72B Qwen/Qwen1.5-0.5B Qwen/Qwen1.5-1.8B
Qwen/Qwen1.5-4B Qwen/Qwen1.5-7B Qwen/Qwen1.5-14B Qwen/Qwen1.5-32B Qwen/Qwen1.5-72B Qwen/Qwen2-0.5B
Qwen/Qwen2-1.5B deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B Qwen/Qwen2.5-3B Qwen/Qwen2-7B
Qwen/Qwen2.5-14B Qwen/Qwen2.5-32B Qwen/Qwen2-72B Qwen/Qwen2-57B-A14B Qwen/Qwen3-0.6B
Qwen/Qwen3-1.7B Qwen/Qwen3-4B Qwen/Qwen3-8B Qwen/Qwen3-14B Qwen/Qwen3-32B Qwen/Qwen3-30B-A3B
Qwen/Qwen3-235B-A22B google/gemma-2b google/gemma-7b google/gemma-2-2b google/gemma-2-9b
google/gemma-2-27b google/gemma-3-1b-pt google/gemma-3-4b-pt google/gemma-3-12b-pt
google/gemma-3-27b-pt microsoft/phi-1 microsoft/phi-2 microsoft/Phi-3-mini-4k-instruct
microsoft/Phi-3-mini-128k-instruct microsoft/Phi-3-medium-4k-instruct
microsoft/Phi-3-medium-128k-instruct microsoft/phi-4 zai-org/GLM-4.5-Air
"""
_OF_PPO = (
    "meta-llama/Meta-Llama-3-8B", "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen2.5-3B",
    "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "google/gemma-2-9b", "google/gemma-3-4b-pt",
    "microsoft/phi-2", "microsoft/Phi-3-mini-4k-instruct", "zai-org/GLM-4.5-Air", "no/such-model",
)  # fmt: skip
_CARDS = (
    "A100-40GB", "A800-80GB", "A30", "H800-80GB", "H20", "H200", "B200", "L40S", "L4", "A10",
    "A40", "A6000", "RTX3090", "RTX5090", "RTX2080Ti", "V100-32GB", "T4", "24GB", "4x22.5GiB",
    "a100 80g", "H100", "A100", "Z100",
)  # fmt: skip

_OF_8 = ("--cluster", "8xA100-80GB", "--host-memory", "1TB", "--cluster.ranks=8")
_LEVERS: Mapping[str, tuple[str, ...]] = {
    "sft": (
        *(f"--actor.zero.stage={stage}" for stage in range(4)),
        "--actor.zero.stage=3 --actor.zero.parameter_offload=cpu "
        "--actor.zero.optimizer_offload=cpu",
        "--actor.zero.stage=2 --actor.zero.optimizer_offload=cpu",
        "--actor.zero.gradient_dtype=bfloat16",
        "--actor.zero.stage=2 --actor.zero.state_dtype=bfloat16",
        "--actor.zero.stage=3 --actor.zero.quantized_weights=true "
        "--actor.zero.hpz_partition_size=4",
        "--actor.zero.bucket_elements=200000000",
        "--actor.model.dtype=float32",
        "--actor.model.attention=sdpa",
        "--actor.model.attention=varlen",
        "--actor.model.gradient_checkpointing=true",
        "--actor.model.gradient_checkpointing=selective",
        "--actor.model.gradient_checkpointing=true --actor.model.checkpoint_every=2",
        "--actor.model.gradient_checkpointing=true --actor.model.activation_offload=cpu",
        "--actor.model.head_chunk=256",
        "--actor.adapter.rank=16",
        "--actor.adapter.rank=16 --actor.adapter.dora=true",
        "--actor.adapter.rank=64 --actor.adapter.targets=[q_proj,down_proj]",
        "--actor.adapter.rank=16 --actor.model.quantization=nf4",
        "--actor.adapter.rank=16 --actor.model.quantization=nf4 "
        "--actor.model.double_quantization=false --actor.zero.stage=3",
        "--actor.optimizer.kind=adamw_8bit",
        "--actor.ema.decay=0.99",
        "--algorithm.neftune_alpha=5",
        "--data.max_tokens=8192 --batch.micro_batch_tokens=16384",
        "--run.keep_checkpoints=5",
    ),
    "distill": (
        "",
        "--teacher.zero.stage=3",
        "--teacher.zero.offload=cpu",
        "--teacher.model.path=Qwen/Qwen2.5-72B --teacher.zero.stage=3",
        "--algorithm.divergence.name=jsd --algorithm.nll_share=0.5",
    ),
    "rm": ("", "--batch.share_prompts=false", "--actor.adapter.rank=8", "--actor.zero.stage=3"),
    "prm": ("", "--actor.zero.stage=3 --actor.model.gradient_checkpointing=true"),
    "dpo": (
        "",
        f"--reference.model.path={QWEN} --reference.zero.stage=3",
        f"--reference.model.path={QWEN} --reference.zero.offload=cpu",
        "--reference_logprobs.precompute=true",
        "--algorithm.loss.name=simpo --algorithm.loss.options={}",
        "--actor.adapter.rank=16",
        "--batch.share_prompts=false",
        "--algorithm.nll_weight=0.2",
    ),
    "kto": ("", "--reference_logprobs.precompute=true", "--actor.adapter.rank=16"),
    "ppo": (
        "--cluster.ranks=7",
        "--cluster.ranks=4 --rollout.engines=4",
        "--cluster.ranks=4 --rollout.engines=2 --rollout.vllm.tensor_parallel=2",
        "--cluster.ranks=8 --rollout.engines=8 --rollout.placement=shared",
        *(
            "--cluster.ranks=8 --rollout.engines=8 --rollout.placement=shared "
            f"--rollout.vllm.memory_share=0.4 --rollout.vllm.sleep_level={level}"
            for level in (1, 2)
        ),
        "--cluster.ranks=3 --cluster.critic_ranks=3 --rollout.engines=2",
        "--cluster.ranks=8 --rollout.transformers={} --rollout.placement=shared",
        "--cluster.ranks=6 --actor.adapter.rank=16 --rollout.vllm.adapter=separate",
        "--cluster.ranks=6 --algorithm.kl=none",
        f"--cluster.ranks=6 --reward_model.role.model.path={QWEN} --reward_model.role.zero.stage=3",
        "--cluster.ranks=6 --batch.responses=8 --rollout.sampling.max_new_tokens=4096 "
        "--batch.micro_batch_tokens=8192",
        "--cluster.ranks=6 --rollout.dtype=float32 --rollout.sync.bucket_bytes=1000000000",
    ),
}

_SUGGESTED = (
    ("scenario-1_dpo_34b_no_checkpointing", ()),
    ("scenario-2_qlora_zero3", _MACHINES["1x4090"]),
    ("scenario-4_qwen2_7b_4090", ()),
    ("scenario-5_orz_1p5b", ()),
    ("docs-ppo-2", _MACHINES["4x4090"]),
    ("docs-sft-1", _MACHINES["cpu"]),
)


def plan_calls(home: Path, pages: Path) -> Iterator[Call]:
    """Writes the configs to `home`. pages: the source whose examples and pages are planned."""
    folder = home / "plans"
    folder.mkdir()
    found = _configs(pages)
    for name, written in found.items():
        (folder / f"{name}.yaml").write_text(written)
        for machine, flags in _MACHINES.items():
            named = "hardware:" in written or machine != "as-written"
            yield from _both(folder, name, machine, flags if named else _ANYWHERE)
    for name, flags in _SUGGESTED:
        words = ("plan", f"{name}.yaml", *flags, "--suggest")
        yield Call(f"plans/suggested/{name}", words, folder)
        yield Call(f"plans/suggested/{name}-all", (*words, "--all"), folder)
        yield Call(f"plans/suggested/{name}-applied", (*words, "--apply", "1"), folder)
    yield Call(f"plans/suggested/{name}-json", (*words, "--json"), folder)
    yield from _of_models(folder)
    yield from _of_cards(folder)
    yield from _of_levers(folder)


def _configs(pages: Path) -> dict[str, str]:
    """By name. Where a page or an example trains a model of its own making, a known one instead."""
    found = {}
    for path in sorted((pages / "examples").rglob("*.yaml")):
        kind = "scenario" if path.parent.name == "scenarios" else path.parent.name
        found[f"{kind}-{path.stem}"] = path.read_text()
    for path in [pages / "README.md", *sorted((pages / "docs").glob("*.md"))]:
        for i, block in enumerate(_BLOCK.findall(path.read_text()), 1):
            found[f"docs-{path.stem}-{i}"] = block
    return {name: _NO_SHAPE.sub(r"\1Qwen/Qwen2.5-1.5B", one) for name, one in found.items()}


def _both(folder: Path, config: str, name: str, flags: tuple[str, ...]) -> Iterator[Call]:
    """As text and as JSON."""
    words = ("plan", f"{config}.yaml", *flags)
    yield Call(f"plans/{config}/{name}", words, folder)
    yield Call(f"plans/{config}/{name}-json", (*words, "--json"), folder)


def _of_models(folder: Path) -> Iterator[Call]:
    for job, models in (("sft", _MODELS.split()), ("ppo", _OF_PPO)):
        stages = {f"{role}.zero.stage": 3 for role in ("actor", "critic")[: 1 + (job == "ppo")]}
        for model in models:
            name = f"model-{job}-{model.replace('/', '-')}"
            config = changed(smallest(job, model), {**stages, "cluster.ranks": 4})
            (folder / f"{name}.yaml").write_text(text(job, config))
            words = ("plan", f"{name}.yaml", *_MACHINES["8xA100"], "--json")
            yield Call(f"plans/models/{name}", words, folder)


def _of_cards(folder: Path) -> Iterator[Call]:
    config = changed(smallest("ppo", "Qwen/Qwen2.5-0.5B"), {"cluster.ranks": 1})
    (folder / "cards.yaml").write_text(text("ppo", config))
    for card in _CARDS:
        amount = card if "x" in card else f"4x{card}"
        yield from _both(folder, "cards", card.replace(" ", "-"), ("--cluster", amount))


def _of_levers(folder: Path) -> Iterator[Call]:
    for job, levers in _LEVERS.items():
        (folder / f"levers-{job}.yaml").write_text(text(job, smallest(job)))
        machine = _OF_8[:4] if job == "ppo" else _OF_8
        for lever in levers:
            name = re.sub(r"[^\w=.,-]+", " ", lever).replace("--", "").replace(" ", "+") or "none"
            words = ("plan", f"levers-{job}.yaml", *machine, *lever.split(), "--json")
            yield Call(f"plans/levers-{job}/{name}", words, folder)
