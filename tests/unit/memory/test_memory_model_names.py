"""Models by name and by directory, and what is said of those that cannot be read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plimsoll.errors import ConfigError
from plimsoll.shapes.families import FAMILIES, shape_from_config
from plimsoll.shapes.known_models import known_models, read_shape

QWEN: dict[str, Any] = dict(known_models()["Qwen/Qwen2.5-7B"])


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("qwen2.5-7b", "Qwen/Qwen2.5-7B"),
        ("META-LLAMA/llama-2-70b", "meta-llama/Llama-2-70b-hf"),
        ("Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("Qwen-1.8B", "Qwen/Qwen-1_8B"),
    ],
)
def test_names_need_neither_case_nor_organisation(asked: str, found: str) -> None:
    assert read_shape(asked).name == found


def test_short_names_are_of_one_model_each() -> None:
    short = [name.lower().partition("/")[2] for name in known_models()]
    assert len(set(short)) == len(short)


def test_every_known_model_can_be_read_by_its_name() -> None:
    for name, config in known_models().items():
        shape, positions = read_shape(name), config["max_position_embeddings"]
        positions = config.get("original_max_position_embeddings", positions)  # of a longrope
        assert (shape.name, shape.positions) == (name, positions)


def test_variants_differ_in_positions_alone() -> None:
    base, chat = read_shape("Qwen2.5-7B"), read_shape("Qwen2.5-7B-Instruct")
    assert (base.positions, chat.positions) == (131_072, 32_768)
    assert base.linears == chat.linears


def test_a_directory_is_read_from_its_config(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    text |= {"num_hidden_layers": 34, "sliding_window": 1024}
    whole = {"model_type": "gemma3", "vision_config": {"hidden_size": 1152}, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    shape, known = read_shape(str(tmp_path)), read_shape("gemma-3-4b-pt")
    assert shape.parameters == known.parameters
    assert (shape.sliding_window, shape.sliding_layers) == (1024, 29)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7b-tuned", "someone/Qwen2.5-7B"])
def test_an_unknown_name_lists_what_is_known(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_shape(name)
    why, known = str(error.value).splitlines()
    assert repr(name) in why
    assert "Nearest: Qwen/Qwen2.5-7B" in why
    assert "mistralai/Mixtral-8x7B-v0.1" in known


@pytest.mark.parametrize("path", ["./models/techer", "models/techer", "{here}/models/techer"])
def test_a_missing_path_is_reported_without_the_list_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "teacher").mkdir(parents=True)
    with pytest.raises(ConfigError) as error:
        read_shape(path.format(here=tmp_path))
    message = str(error.value)
    assert f"`techer` is not in {tmp_path}/models" in message
    assert message.endswith("models/teacher?") and "Qwen" not in message


def test_an_unknown_family_lists_what_is_known() -> None:
    with pytest.raises(ConfigError) as error:
        shape_from_config({**QWEN, "model_type": "qwen4"}, "models/new")
    message = str(error.value)
    assert "'models/new'" in message and "'qwen4'" in message and "Did you mean 'qwen" in message
    assert all(family in message for family in FAMILIES)


def test_fields_missing_from_a_text_config_are_named_with_the_family() -> None:
    """LLaVA 1.5 has such a config.json."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    with pytest.raises(ConfigError) as error:
        shape_from_config({"model_type": "llava", "text_config": text}, "models/sees")
    fields = "hidden_size, intermediate_size, num_hidden_layers, num_attention_heads"
    assert re.match(rf".*'models/sees', .*'llava', .*text_config: {fields} ", str(error.value))
    with pytest.raises(ConfigError, match=r"'idefics', .*text_config: model_type is None"):
        shape_from_config({"model_type": "idefics", "text_config": {}}, "models/sees")


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_shape(str(tmp_path))


def test_an_adapter_is_refused_with_the_merge_command(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter .* -> .*plimsoll merge .*--out"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"{", "is not JSON"), (b"\xff\xfe", "is not JSON"), (b"[1]", "is a list")],
)
def test_a_config_that_is_no_json_object(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as error:
        read_shape(str(tmp_path))
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"model_type": None},
        {"hidden_size": 0},
        {"hidden_size": -3584},
        {"hidden_size": 10**9},
        {"hidden_size": "3584"},
        {"hidden_size": 3584.0},
        {"hidden_size": 3585},
        {"hidden_size": True},
        {"num_hidden_layers": 10**6},
        {"num_attention_heads": 0},
        {"num_attention_heads": 27},
        {"num_key_value_heads": 5},
        {"head_dim": 0},
        {"intermediate_size": None},
        {"vocab_size": -1},
        {"max_position_embeddings": 0},
        {"tie_word_embeddings": "no"},
        {"use_sliding_window": True, "max_window_layers": -1},
        {"use_sliding_window": True, "layer_types": "sliding_attention"},
    ],
)
def test_a_wrong_field_is_named_with_its_value(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        shape_from_config({**QWEN, **wrong}, "models/odd")
    # Heads of a wrong number are told of where they fail to divide.
    field, value = list(wrong.items())[-1]
    if value == 3585:
        field, value = "num_attention_heads", 28
    assert "'models/odd'" in str(error.value)
    assert f"{field} is {value!r}" in str(error.value)


@pytest.mark.parametrize("field", sorted({*QWEN} - {"use_sliding_window", "tie_word_embeddings"}))
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        shape_from_config({k: v for k, v in QWEN.items() if k != field}, "models/odd")


def test_impossible_expert_settings_are_refused() -> None:
    moe = dict(known_models()["Qwen/Qwen3-30B-A3B"])
    with pytest.raises(ConfigError, match="num_experts_per_tok is 129"):
        shape_from_config({**moe, "num_experts_per_tok": 129}, "odd")
    with pytest.raises(ConfigError, match="mlp_only_layers"):
        shape_from_config({**moe, "mlp_only_layers": list(range(48))}, "odd")


def test_reading_a_shape_loads_no_torch() -> None:
    code = (
        "import sys; from plimsoll.shapes.known_models import read_shape; "
        "read_shape('phi-4'); "
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
