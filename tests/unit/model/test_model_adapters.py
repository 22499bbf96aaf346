"""Adapters: their places, first weights, merging, and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from decided import decided_model
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

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
from plimsoll.model.files import companions, hf_state_names
from plimsoll.model.load import load_policy, load_tokenizer, load_value
from plimsoll.model.policy import PackTensors, PolicyModel, ValueModel
from plimsoll.model.quantization import dequantise, plain_shape
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.records import Sample

torch.set_num_threads(1)

CPU = torch.device("cpu")
LINEARS = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
LAYER = "lm.model.layers.0.self_attn.q_proj"
WEIGHT = f"{LAYER}.base_layer.weight"


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "untied"
    write_tiny_model(path, tiny_config("qwen2", False), 0, make_tokenizer())
    return path


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tied"
    write_tiny_model(path, tiny_config("qwen2", True), 0, make_tokenizer())
    return path


def load(path: Path, quantization: str = "none") -> PolicyModel:
    return load_policy(decided_model(str(path), dtype="float32", quantization=quantization), CPU)


def adapted(base: Path, seed: int = 0, quantization: str = "none", **config: Any) -> PolicyModel:
    module = load(base, quantization)
    add_adapter(module, AdapterConfig.model_validate({"rank": 2, **config}), str(base), seed)
    return module


def trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def shake(module: nn.Module) -> None:
    """Move all that is trained, as training would."""
    for i, parameter in enumerate(trained(module).values()):
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
        parameter.add_(0.1 * drawn.to(parameter.dtype))


def score(module: PolicyModel) -> Tensor:
    tokens = torch.arange(3, 12).numpy()
    pack = PackTensors.from_pack(pack_one([Sample(tokens, tokens > 3)], [0]), CPU)
    with torch.no_grad():
        logprobs_L: Tensor = module(pack, False)[0]
    return logprobs_L


def test_all_linear_is_every_linear_of_the_decoder_but_the_head(untied: Path) -> None:
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in trained(adapted(untied))}
    assert layers == set(LINEARS.split(", "))
    some = trained(adapted(untied, targets=("q_proj", "embed_tokens")))
    assert len(some) == 2 * 2 + 2 and "lm.model.embed_tokens.lora_embedding_A.default" in some


@pytest.mark.parametrize(
    "targets", [("q_prj",), ("lm_head",), ("all-linear", "norm"), ("query", "key")]
)
def test_an_unknown_target_is_refused_with_the_models_own_names(
    targets: tuple[str, ...], untied: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{targets[-1]}.* no layer of .*{LINEARS}"):
        adapted(untied, targets=targets)


def test_the_embedding_of_a_tied_model_is_refused(tied: Path) -> None:
    with pytest.raises(ConfigError, match=r"embed_tokens is also the output head"):
        adapted(tied, targets=("embed_tokens",))


def test_the_seed_and_nothing_else_decides_the_first_weights(untied: Path) -> None:
    state = torch.get_rng_state()
    one = trained(adapted(untied, seed=3))
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    two, over_4_bits = trained(adapted(untied, 3)), trained(adapted(untied, 3, "nf4"))
    other = trained(adapted(untied, seed=4))
    assert all(torch.equal(one[n], two[n]) and torch.equal(one[n], over_4_bits[n]) for n in one)
    assert not any(torch.equal(one[n], other[n]) for n in one if "lora_A" in n)


def test_names_are_those_of_the_plain_model(untied: Path, tied: Path) -> None:
    for path in (untied, tied):
        plain, module = load(path), adapted(path)
        assert set(hf_state_names(module).values()) == set(hf_state_names(plain).values())
        assert module.tied_names == plain.tied_names
    assert hf_state_names(adapted(untied))[WEIGHT] == "model.layers.0.self_attn.q_proj.weight"
    embedding = adapted(untied, targets=("embed_tokens",))
    assert set(hf_state_names(embedding).values()) == set(hf_state_names(load(untied)).values())


def test_a_value_functions_head_is_trained_too(untied: Path) -> None:
    module = load_value(decided_model(path=str(untied), dtype="float32"), CPU, seed=0)
    assert isinstance(module, ValueModel)
    add_adapter(module, AdapterConfig(rank=2), str(untied), 0)
    names = trained(module)
    assert "lm.score.weight" in names and all(".lora_" in n for n in names if "score" not in n)


def set_factors(module: PolicyModel, **scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """W, A and B of one layer, as they are after some training."""
    shake(module)
    layer = module.get_submodule(LAYER)
    weight = module.get_parameter(WEIGHT).detach()
    return weight, layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()  # type: ignore[index, union-attr]


@pytest.mark.parametrize(("rslora", "scale"), [(False, 6 / 2), (True, 6 / 2**0.5)])
def test_merging_adds_the_scaled_product_and_leaves_the_base(
    rslora: bool, scale: float, untied: Path
) -> None:
    module = adapted(untied, alpha=6.0, rslora=rslora)
    weight, down, up = set_factors(module)
    before = weight.clone()
    merged = plain_weight(module, WEIGHT)
    want = [
        [
            float(weight[i, j]) + scale * sum(float(up[i, k]) * float(down[k, j]) for k in range(2))
            for j in range(3)
        ]
        for i in range(3)
    ]
    torch.testing.assert_close(merged[:3, :3], torch.tensor(want))
    assert torch.equal(weight, before) and merged.data_ptr() != weight.data_ptr()


def test_dora_scales_each_row_to_its_magnitude(untied: Path) -> None:
    module = adapted(untied, alpha=6.0, dora=True)
    unchanged = plain_weight(module, WEIGHT)
    torch.testing.assert_close(unchanged, module.get_parameter(WEIGHT).detach())
    set_factors(module)
    magnitude = module.get_parameter(f"{LAYER}.lora_magnitude_vector.default.weight").detach()
    torch.testing.assert_close(plain_weight(module, WEIGHT).norm(dim=1), magnitude.abs())


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize(
    "config", [{}, {"dora": True}, {"targets": ("embed_tokens", "down_proj")}], ids=str
)
def test_a_plain_model_with_merged_weights_computes_the_same(
    config: dict[str, Any], quantization: str, untied: Path
) -> None:
    module = adapted(untied, quantization=quantization, **config)
    first = score(module)
    shake(module)
    plain = load(untied)
    weights = {name: plain_weight(module, own) for own, name in hf_state_names(module).items()}
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    plain.load_state_dict({f"lm.{name}": weight for name, weight in weights.items()})
    torch.testing.assert_close(score(plain), score(module), rtol=0, atol=1e-5)
    assert (score(module) - first).abs().max() > 1e-2


def test_a_weight_is_computed_from_its_parts_alone(untied: Path) -> None:
    module = adapted(untied, dora=True)
    assert set(parts_of_weight(module, WEIGHT)) == {
        WEIGHT,
        f"{LAYER}.lora_A.default.weight",
        f"{LAYER}.lora_B.default.weight",
        f"{LAYER}.lora_magnitude_vector.default.weight",
    }
    for name in (f"{LAYER}.base_layer.bias", "lm.model.norm.weight"):
        assert parts_of_weight(module, name) == (name,)


def test_with_the_adapter_off_the_model_is_the_base(untied: Path) -> None:
    module = adapted(untied)
    shake(module)
    names = trained(module).keys()
    on = score(module)
    with pytest.raises(KeyError), adapter_off(module):
        assert torch.equal(score(module), score(load(untied)))
        raise KeyError
    assert torch.equal(score(module), on) and not torch.equal(on, score(load(untied)))
    assert trained(module).keys() == names


def test_scoring_leaves_codes_of_4_bits_as_they_are(untied: Path) -> None:
    """bitsandbytes would lay them out anew on a CPU with AVX-512 in eval mode."""
    module = load(untied, "nf4").eval()
    parameter = module.get_parameter(WEIGHT.replace(".base_layer", ""))
    codes, weight = parameter.detach().clone(), dequantise(parameter)
    in_eval = score(module)
    assert torch.equal(parameter, codes) and torch.equal(dequantise(parameter), weight)
    assert torch.equal(score(module.train()), in_eval)
    assert plain_shape(parameter) == tuple(weight.shape) == (64, 64)
    assert (parameter.dtype, parameter.nbytes) == (torch.float32, 64 * 64 // 2)
    others = [p for name, p in module.named_parameters() if "proj.weight" not in name]
    assert all(getattr(p, "quant_state", None) is None for p in others)


@pytest.fixture
def written(untied: Path, tmp_path: Path) -> Path:
    module = adapted(untied)
    shake(module)
    beside = companions(module.lm, load_tokenizer(str(untied)), "none")
    save_adapter(module, trained(module), beside, tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_comes_back_from_disk(untied: Path, written: Path) -> None:
    module, fresh = adapted(untied), load(untied)
    shake(module)
    load_adapter(fresh, read_adapter_config(written), written)
    assert torch.equal(score(fresh), score(module))


def test_training_goes_on_from_a_saved_adapter(untied: Path, written: Path) -> None:
    """Its weights are trained further; a config that says another form is refused with the key."""
    module = adapted(untied)
    shake(module)
    again = adapted(untied, seed=5, path=str(written))
    assert torch.equal(score(again), score(module))
    assert trained(again).keys() == trained(module).keys()
    other: dict[str, Any]
    for key, other in (
        ("rank", {"rank": 4}),
        ("alpha", {"alpha": 1.0}),
        ("targets", {"targets": ("q_proj",)}),
        ("dora", {"dora": True}),
    ):
        with pytest.raises(ConfigError, match=rf"adapter\.{key} "):
            adapted(untied, path=str(written), **other)
    edit(written, rank_pattern={"q_proj": 1})
    with pytest.raises(ConfigError, match="Merge it by"):
        adapted(untied, path=str(written))


@pytest.mark.parametrize("base", ["tied", "untied"])
def test_modules_that_were_trained_whole_are_pefts_and_are_trained_further(
    base: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """PEFT computes from the files what was trained, and a further training begins with it."""
    path, both = request.getfixturevalue(base), ("embed_tokens", "lm_head")
    module = adapted(path, modules_to_save=both)
    names = {"lm.model.embed_tokens.weight"} | (
        {"lm.lm_head.weight"} if base == "untied" else set()
    )
    assert {name for name in trained(module) if ".lora_" not in name} == names
    shake(module)
    beside = companions(module.lm, load_tokenizer(str(path)), "none")
    save_adapter(module, trained(module), beside, tmp_path / "adapter")

    again = adapted(path, seed=5, path=str(tmp_path / "adapter"), modules_to_save=both)
    assert torch.equal(score(again), score(module))
    assert trained(again).keys() == trained(module).keys()
    with pytest.raises(ConfigError, match=r"adapter\.modules_to_save "):
        adapted(path, path=str(tmp_path / "adapter"))

    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    peft = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", str(path), dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, peft(ids).logits, rtol=0, atol=2e-5)
    torch.testing.assert_close(score(load(tmp_path / "merged")), score(module), rtol=0, atol=2e-5)


def test_an_adapter_with_added_tokens_is_merged(untied: Path, tmp_path: Path) -> None:
    """PEFT saved the embeddings whole, which have three more rows than the base's."""
    model = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32)
    tokens = model.config.vocab_size
    model.resize_token_embeddings(tokens + 3)
    config = LoraConfig(
        r=4, task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["q_proj"]
    )
    peft = get_peft_model(model, config).eval()
    peft.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", str(untied))  # in the base's dtype
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert merged.dtype is torch.float32
    assert merged.config.vocab_size == tokens + 3
    ids = torch.tensor([[1, tokens, tokens + 2, 5]])
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, peft(ids).logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("base", ["tied", "untied"])
@pytest.mark.parametrize(
    "form",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=str,
)
def test_whole_weights_and_embeddings_of_pefts_adapters_are_merged(
    form: dict[str, Any], base: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What PEFT computes with the adapter is what the merged files compute without it."""
    path = request.getfixturevalue(base)
    config = LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **form)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    peft = get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in peft.named_parameters():
        if parameter.requires_grad and "modules_to_save" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    peft.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", str(path), dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, peft(ids).logits, rtol=0, atol=2e-5)
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        assert (plain(ids).logits - merged(ids).logits).abs().max() > 1e-3


def edit(directory: Path, **changes: object) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    "changes", [{"use_qalora": True}, {"init_lora_weights": "pissa"}, {"lora_bias": True}], ids=str
)
def test_forms_that_cannot_be_merged_are_refused(changes: dict[str, object], written: Path) -> None:
    edit(written, **changes)
    with pytest.raises(ConfigError, match=f"{next(iter(changes))}.*not plain LoRA"):
        read_adapter_config(written)


def test_an_adapter_of_another_model_is_refused(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "wider"
    write_tiny_model(path, tiny_config("qwen2", False, hidden=128), 0, make_tokenizer())
    with pytest.raises(ConfigError, match=r"not fit Qwen2ForCausalLM: base_model"):
        load_adapter(load(path), read_adapter_config(written), written)
    shutil.copytree(written, tmp_path / "more")
    edit(tmp_path / "more", target_modules=["q_proj"])
    config = read_adapter_config(tmp_path / "more")
    with pytest.raises(ConfigError, match="missing in one of the two"):
        load_adapter(load(path), config, tmp_path / "more")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_a_quantised_model_unmaps_its_files(quantization: str, tmp_path: Path) -> None:
    """Plain weights stay mapped; in 4 bits one of them would keep all the others' pages."""
    write_tiny_model(tmp_path, tiny_config("qwen2", False), 0, make_tokenizer())
    settings = {"path": str(tmp_path), "dtype": "float32", "quantization": quantization}
    module = load_policy(decided_model(**settings), CPU, cast=False)
    mapped = str(tmp_path) in Path("/proc/self/maps").read_text()
    del module  # it lived until here
    assert mapped == (quantization == "none")
