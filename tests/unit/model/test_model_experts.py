"""Adapters of stacked experts: PEFT's values, gradients and files, without PEFT's whole updates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decided import decided_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from plimsoll.commands.demo import make_tokenizer
from plimsoll.commands.export import merge_adapter
from plimsoll.config.engine import AdapterConfig
from plimsoll.data.packing import pack_one
from plimsoll.errors import ConfigError
from plimsoll.model.adapters import (
    adapter_off,
    add_adapter,
    load_adapter,
    parts_of_weight,
    plain_weight,
    read_adapter_config,
    save_adapter,
)
from plimsoll.model.experts import PARAMETERS, ExpertPairs, stacked_experts
from plimsoll.model.files import companions, hf_state_names
from plimsoll.model.load import load_policy, load_tokenizer
from plimsoll.model.policy import PackTensors, PolicyModel
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.records import Sample

torch.set_num_threads(1)

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 15,
    "pad_token_id": None,
}
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=6, moe_intermediate_size=24
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
    "olmoe": lambda: OlmoeConfig(**SIZES, num_experts=5),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=16
    ),
}
EXPERTS = "lm.model.layers.0.mlp.experts"
TOKENS = torch.arange(3, 31)
ROUNDING = 2e-5
"""What two orders of the same float32 sums differ by, as a part of a gradient's largest number."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("mixtures")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(make()).save_pretrained(home / name)
        make_tokenizer().save_pretrained(home / name)
    return {name: home / name for name in MODELS}


def adapted(base: Path, model: dict[str, Any] | None = None, **adapter: Any) -> PolicyModel:
    module = load_policy(decided_model(str(base), dtype="float32", **(model or {})), CPU)
    form = {"rank": 4, "alpha": 6.0, "targets": ("all-linear", "experts"), **adapter}
    add_adapter(module, AdapterConfig.model_validate(form), str(base), 0)
    return module


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def shaken(module: PolicyModel) -> PolicyModel:
    """Move all that is trained, as training would."""
    with torch.no_grad():
        for i, parameter in enumerate(trained(module).values()):
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
            parameter.add_(0.2 * drawn)
    return module


def score(module: PolicyModel) -> Tensor:
    pack = PackTensors.from_pack(pack_one([Sample(TOKENS.numpy(), TOKENS.numpy() > 3)], [0]), CPU)
    logprobs_L: Tensor = module(pack, False)[0]
    return logprobs_L


def plain_score(model: Any) -> Tensor:
    logits = model(TOKENS[None]).logits[0, :-1].log_softmax(-1)
    found: Tensor = logits.gather(1, TOKENS[1:, None])[:, 0]
    return found


def write(module: PolicyModel, base: Path, directory: Path) -> Path:
    beside = companions(module.lm, load_tokenizer(str(base)), "none")
    save_adapter(module, {n: p.detach() for n, p in trained(module).items()}, beside, directory)
    return directory


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qwen3_moe", {}),
        ("mixtral", {"rslora": True}),
        ("olmoe", {"targets": ("experts",)}),
        ("qwen2_moe", {"targets": ("q_proj", "experts")}),
    ],
)
def test_values_and_gradients_are_pefts(
    name: str, form: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    module = shaken(adapted(models[name], **form))
    plain = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
    directory = write(module, models[name], tmp_path / "adapter")
    peft = PeftModel.from_pretrained(plain, directory, is_trainable=True)
    ours, theirs = score(module), plain_score(peft)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    for result in (ours, theirs):
        result.square().sum().backward()
    files = load_file(directory / "adapter_model.safetensors")
    gradients = {n.replace(".default", ""): p.grad for n, p in peft.named_parameters()}
    found = load_gradients(module, models[name], tmp_path / "gradients")
    assert found.keys() == files.keys() and any(".experts.base_layer.lora_A" in n for n in files)
    for key, gradient in found.items():
        expected = gradients[key]
        assert expected is not None and expected.shape == files[key].shape
        largest = expected.abs().max()
        assert largest > 0
        assert (gradient - expected).abs().max() < ROUNDING * largest, key


def load_gradients(module: PolicyModel, base: Path, directory: Path) -> dict[str, Tensor]:
    """The gradients by the names and in the shapes of PEFT's files."""
    beside = companions(module.lm, load_tokenizer(str(base)), "none")
    gradients = {name: p.grad for name, p in trained(module).items() if p.grad is not None}
    assert gradients.keys() == trained(module).keys()
    save_adapter(module, gradients, beside, directory)
    files: dict[str, Tensor] = load_file(directory / "adapter_model.safetensors")
    return files


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("qwen3_moe", [*PARAMETERS]), ("mixtral", ["mlp.experts.down_proj", "gate_up_proj"])],
)
def test_pefts_adapter_is_read_merged_and_trained_further(
    name: str, parameters: list[str], models: dict[str, Path], tmp_path: Path
) -> None:
    base = models[name]
    config = LoraConfig(
        r=4, lora_alpha=6, task_type="CAUSAL_LM", init_lora_weights=False,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], target_parameters=parameters,
    )  # fmt: skip
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft = get_peft_model(plain, config).eval()
    generator = torch.Generator().manual_seed(0)
    for key, parameter in peft.named_parameters():
        if "lora_" in key:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    peft.save_pretrained(tmp_path / "adapter")
    further = adapted(base, path=str(tmp_path / "adapter"))
    expected = plain_score(peft)
    torch.testing.assert_close(score(further), expected, rtol=0, atol=2e-5)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", str(base), dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(plain_score(merged), expected, rtol=0, atol=2e-5)
    with pytest.raises(ConfigError, match=r"adapter\.targets "):
        adapted(base, path=str(tmp_path / "adapter"), targets=("all-linear",))


@pytest.mark.parametrize(
    "changes",
    [
        {"target_parameters": ["experts.down_proj"]},
        {"rank_pattern": {"down_proj": 2}},
        {"alpha_pattern": {"down_proj": 2}},
    ],
    ids=str,
)
def test_other_adapters_of_parameters_are_refused(
    changes: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    directory = write(adapted(models["olmoe"]), models["olmoe"], tmp_path / "adapter")
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=r"target_parameters.*merge_and_unload"):
        read_adapter_config(directory)


def test_an_adapter_comes_back_from_disk(models: dict[str, Path], tmp_path: Path) -> None:
    base = models["qwen3_moe"]
    module = shaken(adapted(base))
    directory = write(module, base, tmp_path / "adapter")
    fresh = load_policy(decided_model(str(base), dtype="float32"), CPU)
    load_adapter(fresh, read_adapter_config(directory), directory)
    assert torch.equal(score(fresh), score(module))
    again = {name: p.detach() for name, p in trained(fresh).items()}
    assert all(torch.equal(again[name], p) for name, p in trained(module).items())


def test_experts_are_a_target_of_their_own(models: dict[str, Path]) -> None:
    """`all-linear` leaves them out; alone they are all that is trained."""
    base = models["qwen2_moe"]
    linears = trained(adapted(base, targets=("all-linear",)))
    assert not any(f".{part}" in n for n in linears for part in ("experts.", "mlp.gate."))
    assert any("shared_expert.down_proj.lora_A" in name for name in linears)
    experts = trained(adapted(base, targets=("experts",)))
    assert len(experts) == 2 * 2 * 2 and all("experts.lora_" in name for name in experts)
    assert set(trained(adapted(base))) == set(linears) | set(experts)
    shapes = {name.removeprefix(f"{EXPERTS}."): tuple(p.shape) for name, p in experts.items()}
    assert shapes["lora_gate_up_proj.a_ERI"] == (4, 4, 32)
    assert shapes["lora_gate_up_proj.b_EOR"] == (4, 48, 4)
    assert shapes["lora_down_proj.a_ERI"] == (4, 4, 24)
    assert shapes["lora_down_proj.b_EOR"] == (4, 32, 4)


def test_a_dense_model_has_no_experts(models: dict[str, Path], tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "dense", tiny_config("qwen2", False), 0, make_tokenizer())
    with pytest.raises(ConfigError, match=r"experts is no layer of Qwen2ForCausalLM.*`all-linear`"):
        adapted(tmp_path / "dense")
    directory = write(adapted(models["olmoe"]), models["olmoe"], tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"does not fit Qwen2ForCausalLM: .*experts"):
        merge_adapter(directory, tmp_path / "merged", str(tmp_path / "dense"))


def test_with_the_adapter_off_the_model_is_the_base(models: dict[str, Path]) -> None:
    base = models["mixtral"]
    module, plain = adapted(base), load_policy(decided_model(str(base), dtype="float32"), CPU)
    torch.testing.assert_close(score(module), score(plain), rtol=0, atol=1e-6)  # B is 0 at first
    on = score(shaken(module))
    with adapter_off(module):
        assert torch.equal(score(module), score(plain))
    assert torch.equal(score(module), on) and (on - score(plain)).abs().max() > 1e-2


@pytest.mark.parametrize("kind", [True, "selective"])
def test_a_checkpointed_layer_has_the_same_gradients(
    kind: bool | str, models: dict[str, Path]
) -> None:
    found = []
    for setting in (False, kind):
        module = shaken(adapted(models["olmoe"], {"gradient_checkpointing": setting}))
        score(module).sum().backward()
        found.append({name: p.grad for name, p in trained(module).items()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-6)


def test_merged_weights_are_each_experts_own(models: dict[str, Path]) -> None:
    module = shaken(adapted(models["qwen3_moe"], alpha=6.0))
    assert f"{EXPERTS}.down_proj" in hf_state_names(module)
    for leaf in ("gate_up_proj", "down_proj"):
        name = f"{EXPERTS}.{leaf}"
        pairs = module.get_submodule(f"{EXPERTS}.lora_{leaf}")
        assert isinstance(pairs, ExpertPairs)
        weight, before = module.get_parameter(name).detach(), plain_weight(module, name).clone()
        for e in range(6):
            update = pairs.b_EOR[e] @ pairs.a_ERI[e]
            torch.testing.assert_close(before[e], (weight[e] + 6 / 4 * update).detach())
        assert set(parts_of_weight(module, name)) == {
            name, f"{EXPERTS}.lora_{leaf}.a_ERI", f"{EXPERTS}.lora_{leaf}.b_EOR",
        }  # fmt: skip
    assert parts_of_weight(module, "lm.model.layers.0.mlp.gate.weight") == (
        "lm.model.layers.0.mlp.gate.weight",
    )


def test_a_transposed_stack_is_merged_into_its_own_layout() -> None:
    pairs = ExpertPairs(torch.zeros(2, 4, 3), rank=2, scale=0.5, is_transposed=True)
    pairs.b_EOR.data = torch.randn(2, 3, 2)
    merged = pairs.merge_into(torch.ones(2, 4, 3))
    expected = 1 + 0.5 * torch.einsum("eor,eri->eio", pairs.b_EOR, pairs.a_ERI)
    torch.testing.assert_close(merged, expected.detach())


def test_four_bits_leave_experts_as_they_are(models: dict[str, Path]) -> None:
    """bitsandbytes quantises linear layers alone; experts' adapters are those of a 16-bit base."""
    base = models["qwen3_moe"]
    module = shaken(adapted(base, {"quantization": "nf4"}))
    coded = module.get_parameter("lm.model.layers.0.self_attn.q_proj.base_layer.weight")
    stack = module.get_parameter(f"{EXPERTS}.down_proj")
    whole = shaken(adapted(base))
    assert hasattr(coded, "quant_state") and not hasattr(stack, "quant_state")
    name = f"{EXPERTS}.down_proj"
    assert torch.equal(plain_weight(module, name), plain_weight(whole, name))
    score(module).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in trained(module).values())


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_card_computes_what_the_cpu_does(dtype: torch.dtype) -> None:
    """Rows of experts, of which one has none; values and gradients, to rounding in the dtype."""
    torch.manual_seed(0)
    pairs = ExpertPairs(torch.empty(4, 48, 32), rank=8, scale=2.0, is_transposed=False)
    pairs.b_EOR.data.normal_()
    rows, ends = torch.randn(40, 32), torch.tensor([9, 9, 30, 40], dtype=torch.int32)
    found = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        there = pairs.to(device, kind).requires_grad_(True)
        inputs = rows.detach().to(device, kind).clone().requires_grad_(True)
        added = there(inputs, ends.to(device))
        there.zero_grad()
        added.square().sum().backward()
        parts = (added, inputs.grad, there.a_ERI.grad, there.b_EOR.grad)
        found.append([part.detach().float().cpu() for part in parts if part is not None])
    bound = 0.03 if dtype is torch.bfloat16 else 1e-5
    for expected, got in zip(*found, strict=True):
        assert (got - expected).abs().max() < bound * expected.abs().max()


def test_no_more_than_the_rank_is_added(models: dict[str, Path]) -> None:
    """No tensor of a forward is as large as a stack's update, but the stack itself."""
    module = adapted(models["qwen3_moe"])
    [first, _] = stacked_experts(module.lm)
    saved: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved.append(tuple(tensor.shape))
        return tensor

    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    hidden = torch.randn(28, 32, requires_grad=True)
    chosen = torch.stack([torch.arange(28) % 6, (torch.arange(28) + 1) % 6], 1)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        first(hidden, chosen, torch.full((28, 2), 0.5))
    assert saved and all(len(shape) < 3 or shape[0] == 28 for shape in saved)


def test_the_seed_and_nothing_else_decides_the_first_weights(models: dict[str, Path]) -> None:
    state = torch.get_rng_state()
    one = trained(adapted(models["olmoe"], targets=("experts",)))
    assert torch.equal(torch.get_rng_state(), state)
    two = trained(adapted(models["olmoe"], targets=("experts",)))
    bound = 1 / 32**0.5  # of kaiming_uniform with a = sqrt(5): as PEFT's
    for name, parameter in one.items():
        assert torch.equal(parameter, two[name])
        if name.endswith("lora_gate_up_proj.a_ERI"):
            assert 0.9 * bound < parameter.abs().max() <= bound
        if name.endswith("b_EOR"):
            assert not parameter.any()
