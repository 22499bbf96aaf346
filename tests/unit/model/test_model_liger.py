"""Norms, gated MLPs and rotary embeddings by Liger's kernels against transformers' own modules.

They run on a card, or by Triton's interpreter, which has no bfloat16 (`TRITON_INTERPRET=1`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_cases import fused_in, kept_by
from interpreted import DEVICE, HAS_CARD, complete_interpreter, why_not
from packed_cases import (
    LENGTHS,
    SMALL,
    Outcome,
    alone,
    outcome,
    samples_of,
    settings_for,
    write,
)
from torch import Tensor, nn
from transformers import GemmaConfig, LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from plimsoll.config.engine import AdapterConfig
from plimsoll.data.packing import pack_one
from plimsoll.errors import PlimsollError
from plimsoll.model import fused, load
from plimsoll.model.adapters import add_adapter
from plimsoll.model.files import hf_state_names
from plimsoll.model.fused import fuse
from plimsoll.model.load import load_policy
from plimsoll.model.policy import PackTensors
from plimsoll.model.tiny import Family, tiny_config

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    *([pytest.mark.gpu] if HAS_CARD else []),
]
if not why_not():
    complete_interpreter()
    from plimsoll.model import liger

NARROW = torch.bfloat16 if HAS_CARD else torch.float16
WITHIN = {torch.float32: 1e-5, NARROW: 2**-6 if HAS_CARD else 2**-9}
"""Of the largest number of a tensor."""
DTYPES = [torch.float32, NARROW]


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


def close(found: Tensor, wanted: Tensor, within: float) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    largest = float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=within * largest)


def compare(module: Any, inputs: Tensor) -> list[Tensor | None]:
    """The output and the gradients of the input and of all weights, by Liger's kernels; they are
    those of transformers."""
    own = deepcopy(module)
    fuse(module, liger.FUSIONS)
    assert "forward" in vars(module)
    slopes = torch.randn(inputs.shape, dtype=inputs.dtype)
    given, outcomes = slopes.clone(), []
    for each in (own, module):
        leaf = inputs.clone().requires_grad_()
        output = each(leaf)
        output.backward(slopes.to(output.dtype))
        weights = [parameter.grad for parameter in each.parameters()]
        outcomes.append([output.detach(), leaf.grad, *weights])
    wanted, found = outcomes
    assert torch.equal(slopes, given)  # a residual may share it
    for one, other in zip(wanted, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            close(other, one, WITHIN[inputs.dtype])
    return found


def a_norm(kind: type[Any], width: int, dtype: torch.dtype) -> Any:
    norm = kind(width, 1e-5)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    return norm.to(dtype)


MANY = [(32777, 128)] if HAS_CARD else []
"""Rows that are narrow and many have a kernel of their own, which an interpreter takes long for."""


@pytest.mark.parametrize("shape", [(37, 64), (1, 19, 48), (2, 9, 4, 16), *MANY], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm, GptOssRMSNorm])
def test_a_norm(kind: type[Any], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    compare(a_norm(kind, shape[-1], dtype), torch.randn(shape, dtype=dtype))


@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm, GptOssRMSNorm])
def test_a_frozen_norm_gets_no_gradient(kind: type[Any]) -> None:
    norm = a_norm(kind, 16, torch.float32).requires_grad_(False)
    *_, of_weight = compare(norm, torch.randn(5, 16))
    assert of_weight is None


@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm, GptOssRMSNorm])
def test_an_fp32_weight_with_a_narrow_input(kind: type[Any]) -> None:
    """Llama's result is then in fp32, the others' are not."""
    compare(a_norm(kind, 32, torch.float32), torch.randn(11, 32, dtype=NARROW))


def test_a_norm_is_rounded_before_its_weight_and_after() -> None:
    """Ours and transformers' are; rounded once, about one number in eight would differ."""
    norm = a_norm(LlamaRMSNorm, 256, NARROW)
    inputs = torch.randn(64, 256, dtype=NARROW)
    found = liger.rms_norm(inputs, norm.weight, 1e-5)
    once = torch.rms_norm(inputs.float(), (256,), norm.weight.float(), 1e-5).to(NARROW)
    assert float((found == norm(inputs)).float().mean()) > 0.99
    assert float((once == norm(inputs)).float().mean()) < 0.9


@pytest.mark.parametrize("norm", [fused.rms_norm, "liger"])
def test_a_norm_keeps_what_ours_keeps(norm: Any) -> None:
    norm = liger.rms_norm if norm == "liger" else norm
    inputs = torch.randn(1, 40, 64, dtype=NARROW).requires_grad_()
    weight = torch.ones(64, dtype=NARROW, requires_grad=True)
    assert stored(lambda: norm(inputs, weight, 1e-5)) == 2 * 40 * 64 + 2 * 64 + 4 * 40


def test_a_gemma_norm_keeps_its_input_as_it_is() -> None:
    inputs = torch.randn(1, 40, 64, dtype=NARROW).requires_grad_()
    weight = torch.ones(64, dtype=NARROW, requires_grad=True)
    kept = stored(lambda: liger.offset_rms_norm(inputs, weight, 1e-5))
    assert kept == 2 * 40 * 64 + 2 * 64 + 4 * 40


def stored(forward: Callable[[], object]) -> int:
    """Bytes of all storages that autograd keeps."""
    storages = (tensor.untyped_storage() for tensor in kept_by(forward))
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def an_mlp(family: str, dtype: torch.dtype) -> Any:
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 40, "num_attention_heads": 2}
    if family == "llama":
        return LlamaMLP(LlamaConfig(**shape)).to(dtype)
    return GemmaMLP(GemmaConfig(**shape, hidden_activation="gelu_pytorch_tanh")).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_a_gated_mlp(family: str, dtype: torch.dtype) -> None:
    assert len(compare(an_mlp(family, dtype), torch.randn(1, 7, 16, dtype=dtype))) == 5


@pytest.mark.parametrize("function", ["silu_gate", "gelu_gate"])
def test_gate_and_up_are_kept_and_written_over(function: str) -> None:
    """Gate and up become their gradients, so another backward pass is refused."""
    gate, up = (torch.randn(9, 40, requires_grad=True) for _ in range(2))
    made = gate * 1, up * 1
    assert stored(lambda: getattr(liger, function)(*made)) == 2 * 4 * 9 * 40
    product = getattr(liger, function)(*made)
    product.sum().backward(retain_graph=True)
    for kept, leaf in zip(made, (gate, up), strict=True):
        assert leaf.grad is not None and torch.equal(kept, leaf.grad)
    with pytest.raises(PlimsollError, match="second backward pass"):
        product.sum().backward()


def tables(dtype: torch.dtype, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """Return rotary tables of a pack of two sequences, whose positions begin again."""
    shape: dict[str, Any] = {"hidden_size": 4 * width, "num_attention_heads": 4}
    embedding = LlamaRotaryEmbedding(LlamaConfig(**shape))
    first = tokens // 3
    positions = torch.cat([torch.arange(first), torch.arange(tokens - first)])[None]
    cos, sin = embedding(torch.empty(1, dtype=dtype), positions)
    return cos, sin


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("part", [slice(None), slice(8)], ids=["all", "a part"])
def test_queries_and_keys_are_rotated(part: slice, dtype: torch.dtype) -> None:
    tokens, width = 11, 16
    cos, sin = tables(dtype, tokens, width if part.stop is None else part.stop)
    made = [torch.randn(1, tokens, heads * width, dtype=dtype) for heads in (6, 2)]
    before = deepcopy(made)
    outcomes = []
    slopes = [torch.randn(1, heads, tokens, cos.shape[-1], dtype=dtype) for heads in (6, 2)]
    given = deepcopy(slopes)
    for rotate in (apply_rotary_pos_emb, liger.rotate):
        leaves = [x.clone().requires_grad_() for x in made]
        heads = [x.view(1, tokens, -1, width).transpose(1, 2)[..., part] for x in leaves]
        rotated = rotate(heads[0], heads[1], cos, sin)
        torch.autograd.backward(rotated, slopes)
        assert all(map(torch.equal, leaves, before)) and all(map(torch.equal, slopes, given))
        outcomes.append([*(x.detach() for x in rotated), *(x.grad for x in leaves)])
    for wanted, found in zip(*outcomes, strict=True):
        assert wanted is not None and found is not None
        close(found, wanted, WITHIN[dtype])


def test_tables_of_another_dtype_are_left_to_transformers() -> None:
    cos, sin = tables(torch.float32, 5, 8)
    heads = [torch.randn(1, n, 5, 8, dtype=NARROW) for n in (4, 2)]
    wanted = apply_rotary_pos_emb(*heads, cos, sin)
    found = liger.rotate(heads[0], heads[1], cos, sin)
    assert found[0].dtype == torch.float32 and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3"]
)
def test_the_fused_modules_of_a_family(family: Family) -> None:
    parts = ["input_layernorm", "post_attention_layernorm", "mlp", "self_attn"]
    if family in ("qwen3", "gemma3"):
        parts += ["self_attn.q_norm", "self_attn.k_norm"]
    if family in ("gemma2", "gemma3"):
        parts += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    wanted = {f"model.layers.{i}.{part}" for i in range(2) for part in parts}
    assert fused_in(tiny_config(family, True), liger.FUSIONS) == wanted | {"model.norm"}


def together(path: Path, rank: int = 0, **changes: Any) -> Outcome:
    """All sequences in one pack, through a policy that Liger's kernels compute."""
    samples = samples_of(LENGTHS)
    config = settings_for(path, **changes)
    with torch.device("cpu"):
        model = load_policy(config, DEVICE)
        if rank:
            add_adapter(model, AdapterConfig(rank=rank, alpha=8.0), str(path), seed=0)
            torch.manual_seed(0)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, 0.0, 0.1)
    model.to(DEVICE)
    pack = PackTensors.from_pack(pack_one(samples, range(len(samples)), None), DEVICE)
    result = model(pack, entropy="loss")
    found = outcome(result.logprobs_L.cpu(), result.entropy_L.cpu(), model)
    names = hf_state_names(model) if not rank else {n: n for n in found.gradients}
    gradients = {names[n]: gradient.cpu() for n, gradient in found.gradients.items()}
    return Outcome(found.logprobs, found.entropy, gradients)


def agree(found: Outcome, want: Outcome) -> None:
    """In fp32: a card adds in another order than the CPU."""
    within = 1e-4 if HAS_CARD else 1e-5
    assert found.gradients.keys() == want.gradients.keys()
    pairs = [(found.gradients[name], wanted) for name, wanted in want.gradients.items()]
    pairs += [(found.logprobs, want.logprobs), (found.entropy, want.entropy)]
    for got, wanted in pairs:
        largest = max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(got, wanted, rtol=within, atol=within * largest)


@pytest.fixture
def by_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card it is so; here too, then."""
    monkeypatch.setattr(load, "fusions_of", lambda name: liger.FUSIONS)


@pytest.mark.usefixtures("by_liger")
@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        ("llama", False),
        ("llama", True),
        ("llama", "selective"),
        ("qwen3", "selective"),
        ("gemma2", True),
        ("gemma3", False),
        ("gemma3", "selective"),
    ],
)
def test_a_policy_learns_as_transformers_does(
    family: Family, checkpointing: bool | str, tmp_path: Path
) -> None:
    """Selective checkpointing keeps results of products, which rotating in place would spoil."""
    path = write(tmp_path / "model", tiny_config(family, True, **SMALL))
    with torch.device("cpu"):
        want = alone(path, samples_of(LENGTHS))
    agree(together(path, gradient_checkpointing=checkpointing), want)


@pytest.mark.parametrize("checkpointing", [False, "selective"])
def test_an_adapter_learns_as_with_our_functions(
    checkpointing: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weights but the adapter's are frozen."""
    path = write(tmp_path / "model", tiny_config("llama", True, **SMALL))
    outcomes = []
    for fusions in (fused.FUSIONS, liger.FUSIONS):
        monkeypatch.setattr(load, "fusions_of", lambda name, given=fusions: given)
        outcomes.append(together(path, rank=4, gradient_checkpointing=checkpointing))
    want, found = outcomes
    assert len(want.gradients) == 2 * 2 * 7
    agree(found, want)
