"""Refusals before weights are read, and the way to disk and back."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from decided import decided_model
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    Gemma3Config,
    GPT2Config,
    MambaConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    T5Config,
)

from plimsoll.commands.export import load_plain
from plimsoll.config.engine import ModelConfig
from plimsoll.data.packing import pack_one
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.model.attention import VARLEN
from plimsoll.model.checks import read_model_config
from plimsoll.model.files import hf_state_names, save_hf
from plimsoll.model.load import (
    attention_name,
    load_policy,
    load_tokenizer,
    load_value,
)
from plimsoll.model.policy import PackTensors, PolicyModel, ValueModel
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.records import Sample

torch.set_num_threads(1)

CPU = torch.device("cpu")


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, "one": 2, "two": 3}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        eos_token="<eos>",
        pad_token="<pad>",
    )


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    path = tmp_path / "small-model"
    config = tiny_config("qwen2", True)
    config.initializer_range = 0.2
    write_tiny_model(path, config, seed=0, tokenizer=make_tokenizer())
    return path


def model_settings(path: Path, **changes: Any) -> ModelConfig:
    return decided_model(path=str(path), dtype="float32").model_copy(update=changes)


def one_pack() -> PackTensors:
    rng = np.random.default_rng(0)
    samples = [Sample(rng.integers(0, 256, n), np.arange(n) > 0) for n in (6, 9)]
    return PackTensors.from_pack(pack_one(samples, [0, 1]), CPU)


def change_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def write_config_only(path: Path, config: PreTrainedConfig) -> Path:
    """A directory whose weights are unreadable: a refusal must come before they are opened."""
    config.save_pretrained(path)
    (path / "model.safetensors").write_bytes(b"never opened")
    return path


def refusal(path: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_policy(model_settings(path, **changes), CPU)
    return str(caught.value)


def test_a_missing_directory_is_refused(model_path: Path) -> None:
    """A rank's machine may lack files that the controller's has."""
    with pytest.raises(ConfigError, match=r"There is no directory .*smal-model here"):
        read_model_config(str(model_path.parent / "smal-model"))
    with pytest.raises(ConfigError, match=r"There is no directory .*smal-model here"):
        load_tokenizer(str(model_path.parent / "smal-model"))


def test_a_directory_without_config(model_path: Path) -> None:
    (model_path / "config.json").unlink()
    assert "config.json" in refusal(model_path)


def test_a_broken_config(model_path: Path) -> None:
    (model_path / "config.json").write_text("{")
    assert "config.json" in refusal(model_path)


def test_an_unknown_model_type(model_path: Path) -> None:
    change_config(model_path, model_type="no-such-family")
    assert "no-such-family" in refusal(model_path)


def test_missing_and_broken_tokenizers(model_path: Path) -> None:
    assert load_tokenizer(str(model_path)).eos_token_id == 1
    (model_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not valid JSON"):
        load_tokenizer(str(model_path))
    for file in model_path.glob("*token*"):
        file.unlink()
    with pytest.raises(ConfigError, match="has no tokenizer"):
        load_tokenizer(str(model_path))


def test_pickled_weights_are_never_read(model_path: Path) -> None:
    (model_path / "model.safetensors").rename(model_path / "pytorch_model.bin")
    assert "Cannot read the weights" in refusal(model_path)


def test_a_shard_that_the_index_names_is_missing(model_path: Path) -> None:
    (model_path / "model.safetensors").rename(model_path / "model-00001-of-00002.safetensors")
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    parts = {"model.embed_tokens.weight": names[0], "model.norm.weight": names[1]}
    index = {"metadata": {}, "weight_map": parts}
    (model_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors" in refusal(model_path)


def test_truncated_weights(model_path: Path) -> None:
    file = model_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert "weights" in refusal(model_path)


def test_an_absent_tensor_is_not_made_up(model_path: Path) -> None:
    file = model_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refusal(model_path)


def test_weights_of_another_shape(model_path: Path) -> None:
    change_config(model_path, intermediate_size=120)
    message = refusal(model_path)
    assert re.search(r"up_proj\.weight .*\[128, 64\].*\[120, 64\]", message)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (T5Config(), "encoder-decoder"),
        (BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), "not causal"),
        (MambaConfig(), "recurrence"),
        (GPT2Config(n_layer=1), "attn_pdrop"),
        (OPTConfig(num_hidden_layers=1), "'dropout': 0.1"),
        (BloomConfig(n_layer=1), "attention interface"),
        (Gemma3Config(), "parts beside"),
    ],
)
def test_models_that_cannot_be_packed(config: PreTrainedConfig, why: str, tmp_path: Path) -> None:
    assert why in refusal(write_config_only(tmp_path / "m", config))


def test_an_unknown_factor_of_the_logits(model_path: Path) -> None:
    change_config(model_path, logit_scale=0.5)
    assert "logit_scale" in refusal(model_path)
    change_config(model_path, logit_scale=1.0)
    load_policy(model_settings(model_path), CPU)


def test_varlen_needs_cuda(model_path: Path) -> None:
    message = refusal(model_path, attention="varlen")
    assert "CUDA" in message and "sdpa" in message


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (Qwen2Config(hidden_size=128, num_attention_heads=4), None),
        (Qwen2Config(hidden_size=120, num_attention_heads=10), "12"),  # heads of 12
        (DeepseekV3Config(), "192"),  # keys of 192, values of 128
    ],
)
def test_varlen_is_taken_where_its_kernel_has_the_heads(
    config: PreTrainedConfig, refused: str | None
) -> None:
    varlen = decided_model(path="m", dtype="bfloat16", attention="varlen")
    with patch("torch.cuda.get_device_capability", lambda device: (9, 0)):
        if refused is None:
            assert attention_name(varlen, config, torch.device("cuda")) == VARLEN
        else:
            with pytest.raises(ConfigError, match=refused):
                attention_name(varlen, config, torch.device("cuda"))


def test_a_model_that_cards_train_is_merged_and_exported_on_the_cpu(model_path: Path) -> None:
    model = model_settings(model_path, attention="varlen", kernels="liger")
    assert isinstance(load_plain(model, is_value=False), PolicyModel)


def policy_state(path: Path, **changes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    model = load_policy(model_settings(path, **changes), CPU)
    names = hf_state_names(model)
    return model, {names[n]: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
def test_saved_policy_gives_the_same_logprobs_in_transformers(tied: bool, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "a", tiny_config("qwen2", tied), 0, make_tokenizer())
    model, state = policy_state(tmp_path / "a")
    with torch.no_grad():  # a trained model, not the one on the disk
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(5)
            )
    pack = one_pack()
    ours = model(pack).logprobs_L.detach()
    out = tmp_path / "b"
    save_hf(model.lm.config, state, load_tokenizer(str(tmp_path / "a")), out)

    plain = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    assert plain.dtype == torch.float32
    assert type(plain).__name__ == json.loads((out / "config.json").read_text())["architectures"][0]
    tokens = pack.tokens_T[:6]
    logp = plain(tokens[None]).logits[0].log_softmax(-1)
    want = logp[:-1].gather(1, tokens[1:, None])[:, 0]
    torch.testing.assert_close(ours[:5], want, rtol=1e-5, atol=1e-5)
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) == (not tied)
    assert AutoTokenizer.from_pretrained(out).eos_token == "<eos>"
    again = load_policy(model_settings(out), CPU)
    assert torch.equal(again(pack).logprobs_L, ours)


def test_tied_tensors_under_both_names_are_written_once(model_path: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model_path)
    save_hf(plain.config, plain.state_dict(), None, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.embed_tokens.weight" in written and "lm_head.weight" not in written


def test_bfloat16_is_written_as_bfloat16(model_path: Path, tmp_path: Path) -> None:
    model, state = policy_state(model_path, dtype="bfloat16")
    save_hf(model.lm.config, state, None, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_saving_replaces_the_old_directory_whole(model_path: Path) -> None:
    (model_path / "stale.txt").write_text("old")
    model, state = policy_state(model_path)
    save_hf(model.lm.config, state, make_tokenizer(), model_path)
    assert not (model_path / "stale.txt").exists()
    load_policy(model_settings(model_path), CPU)
    assert [p.name for p in model_path.parent.iterdir()] == [model_path.name]


def test_a_failed_save_leaves_what_was_there(model_path: Path) -> None:
    model, state = policy_state(model_path)
    before = {f.name: f.read_bytes() for f in model_path.iterdir()}
    meta = {name: tensor.to("meta") for name, tensor in state.items()}
    with pytest.raises(NotImplementedError):
        save_hf(model.lm.config, meta, None, model_path)
    assert {f.name: f.read_bytes() for f in model_path.iterdir()} == before
    assert [p.name for p in model_path.parent.iterdir()] == [model_path.name]


def test_saving_where_a_file_stands_in_the_way(model_path: Path, tmp_path: Path) -> None:
    model, state = policy_state(model_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(PlimsollError, match="file"):
        save_hf(model.lm.config, state, None, tmp_path / "file" / "out")


def values_of(path: Path, seed: int = 0) -> tuple[ValueModel, torch.Tensor]:
    model = load_value(model_settings(path), CPU, seed)
    return model, model(one_pack())


def test_new_value_heads_are_small_and_follow_the_seed(model_path: Path) -> None:
    first, second, other = (values_of(model_path, seed)[0].lm.score.weight for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert first.shape == (1, 64)
    assert 0.7 / 65 < float(first.detach().std()) < 1.4 / 65


def test_drawing_a_value_head_leaves_the_random_state(model_path: Path) -> None:
    state = torch.random.get_rng_state()
    values_of(model_path)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_values_train_score_and_decoder(model_path: Path) -> None:
    model, values = values_of(model_path)
    assert values.dtype == torch.float32 and values.shape == (13,)
    values.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_saved_value_model_loads_as_sequence_classification(
    model_path: Path, tmp_path: Path
) -> None:
    model, values = values_of(model_path, seed=4)
    names = hf_state_names(model)
    state = {names[n]: p.detach() for n, p in model.named_parameters()}
    save_hf(model.lm.config, state, None, tmp_path / "critic")

    plain = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "critic", attn_implementation="eager"
    )
    assert plain.config.num_labels == 1
    # It scores the last token; the value before the first sequence's 6th token is at its 5th.
    tokens = one_pack().tokens_T[:5]
    torch.testing.assert_close(plain(tokens[None]).logits[0, 0], values[4], rtol=1e-5, atol=1e-6)
    again, same = values_of(tmp_path / "critic", seed=99)
    assert torch.equal(same, values) and torch.equal(again.lm.score.weight, model.lm.score.weight)
    with pytest.raises(ConfigError, match=r"critic' is .*\(Qwen2ForSequenceClassification\)"):
        load_policy(model_settings(tmp_path / "critic"), CPU)


def test_a_classifier_of_several_labels_is_refused(model_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "classifier"
    shutil.copytree(model_path, copy)
    tensors = load_file(copy / "model.safetensors") | {"score.weight": torch.zeros(3, 64)}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"score\.weight has the shape \[3, 64\]"):
        load_value(model_settings(copy), CPU, 0)


def test_tiny_models_follow_their_seed_and_know_the_special_tokens(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_tiny_model(tmp_path / name, tiny_config("llama", False), seed, make_tokenizer())
    a, b, c = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
    assert a == b and a != c
    config = read_model_config(str(tmp_path / "a"))
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (1, 0, None)


def test_a_generic_tokenizer_beside_a_qwen2_model_keeps_its_own_splitting(tmp_path: Path) -> None:
    # AutoTokenizer would take Qwen2's pre-tokenizer, for which the vocabulary has no space token.
    words = Tokenizer(models.WordLevel({"a": 0, " ": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="?")
    write_tiny_model(tmp_path / "model", tiny_config("qwen2", tied=True), 0, tokenizer)
    loaded = load_tokenizer(str(tmp_path / "model"))
    assert loaded("a a")["input_ids"] == [0, 1, 0]
