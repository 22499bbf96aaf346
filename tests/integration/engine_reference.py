"""The same training in plain PyTorch and transformers: one process, every sequence by itself,
whole logits, torch's AdamW and clip_grad_norm_. No packing, no DeepSpeed, nothing of Plimsoll's
but the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from engine_cases import CLIP_VALUE, DECAY, RATES, SEED, Batch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
)

from plimsoll.records import Floats, Sample
from plimsoll.trainer.worker import UpdateResult

torch.set_num_threads(1)  # the models are too small for more

Weights = dict[str, Tensor]
Metrics = dict[str, Tensor]
Loss = Callable[[Any, Batch], Metrics]
"""From a model and a batch to named scalars; `loss` is among them."""


@dataclass(frozen=True)
class PlainStep:
    """metrics: of the whole batch, `loss` among them. grad_norm: before clipping."""

    metrics: dict[str, float]
    grad_norm: float


@dataclass(frozen=True)
class PlainRun:
    """average: the moving average of the masters, whose decay is DECAY in the end."""

    steps: tuple[PlainStep, ...]
    before: Weights
    after: Weights
    average: Weights


def plain_policy(
    path: Path, dtype: torch.dtype | Literal["auto"] = torch.float32, *, quantised: bool = False
) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", **_in_4_bits(quantised, dtype)
    )


def _in_4_bits(
    quantised: bool, dtype: torch.dtype | Literal["auto"], skip: Sequence[str] = ()
) -> dict[str, Any]:
    if not quantised:
        return {}
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[*skip] or None,
    )
    return {"quantization_config": settings}


def plain_critic(path: Path, dtype: torch.dtype = torch.float32, *, quantised: bool = False) -> Any:
    """A critic with the head that the seed decides: normal, standard deviation 1 / (H + 1)."""
    model = AutoModelForSequenceClassification.from_pretrained(
        path,
        num_labels=1,
        dtype=dtype,
        attn_implementation="eager",
        **_in_4_bits(quantised, dtype, ["score"]),
    )
    hidden = model.config.hidden_size
    drawn = torch.randn(1, hidden, generator=torch.Generator().manual_seed(SEED))
    model.score.weight.data.copy_(drawn / (hidden + 1))
    return model


def plain_adapted(base: Any, adapter: Path) -> PeftModel:
    """The base with an adapter from a file, which learns."""
    base.train()  # in eval mode bitsandbytes lays the weights of a CPU out anew
    return PeftModel.from_pretrained(
        base, adapter, is_trainable=True, autocast_adapter_dtype=False
    ).train()


def named_as_saved(run: PlainRun) -> PlainRun:
    """The run of an adapter, its weights named as PEFT writes them."""

    def renamed(weights: Weights) -> Weights:
        short = {
            name.replace(".modules_to_save", "").replace(".default", ""): tensor
            for name, tensor in weights.items()
        }
        return {n.replace("magnitude_vector.weight", "magnitude_vector"): short[n] for n in short}

    weights = (renamed(run.before), renamed(run.after), renamed(run.average))
    return PlainRun(run.steps, *weights)


def plain_logprobs(model: Any, sample: Sample, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the sample's learned tokens."""
    tokens = torch.from_numpy(sample.tokens)
    logits_TV = model(tokens[None], use_cache=False).logits[0, :-1].float() / temperature
    logp_TV = torch.log_softmax(logits_TV, dim=-1)
    loss_mask = torch.from_numpy(sample.loss_mask[1:])
    logp_T = logp_TV.gather(1, tokens[1:, None])[:, 0]
    return logp_T[loss_mask], -(logp_TV.exp() * logp_TV).sum(-1)[loss_mask]


def plain_values(model: Any, sample: Sample) -> Tensor:
    """The values of the states that the sample's learned tokens are chosen in."""
    return _scores(model, sample)[:-1][torch.from_numpy(sample.loss_mask[1:])]


def plain_scores(model: Any, sample: Sample) -> Tensor:
    """The scores of the sample's learned tokens, each the last that was read."""
    return _scores(model, sample)[torch.from_numpy(sample.loss_mask)]


def _scores(model: Any, sample: Sample) -> Tensor:
    tokens = torch.from_numpy(sample.tokens)
    whole = model.base_model.model if isinstance(model, PeftModel) else model
    hidden_TH = whole.model(tokens[None], use_cache=False).last_hidden_state[0]
    scores_T: Tensor = whole.score(hidden_TH)[:, 0].float()
    return scores_T


def _flat(arrays: Sequence[Floats]) -> Tensor:
    return torch.cat([torch.from_numpy(a) for a in arrays])


def sft_loss(model: Any, batch: Batch) -> Metrics:
    logp_L = torch.cat([plain_logprobs(model, s)[0] for s in batch.samples])
    return {"loss": -logp_L.mean(), "nll": -logp_L.mean()}


def policy_loss(model: Any, batch: Batch) -> Metrics:
    """PPO's loss with the numbers of `engine_cases.OBJECTIVE`, written out token by token."""
    pairs = [plain_logprobs(model, s) for s in batch.samples]
    logp_L, entropy_L = (torch.cat(column) for column in zip(*pairs, strict=True))
    ratio_L = (logp_L - _flat(batch.old_logprobs)).exp()
    terms, clipped = [], 0
    for ratio, advantage in zip(ratio_L, _flat(batch.advantages), strict=True):
        if advantage >= 0:
            flat = bool(ratio > 1.3)
            terms.append(1.3 * advantage if flat else ratio * advantage)
        else:
            flat = bool(ratio < 0.8 or ratio > 1.5)
            terms.append(
                min(1.5, max(0.8, ratio.item())) * advantage if flat else ratio * advantage
            )
        clipped += flat
    surrogate = -torch.stack(terms).mean()
    log_ratio_L = _flat(batch.reference_logprobs) - logp_L
    kl = (log_ratio_L.exp() - 1 - log_ratio_L).mean()
    entropy = entropy_L.mean()
    return {
        "loss": surrogate + 0.1 * kl - 0.05 * entropy,
        "policy_loss": surrogate,
        "kl_loss": kl,
        "entropy": entropy,
        "ratio": ratio_L.mean(),
        "clip_fraction": torch.tensor(clipped / len(ratio_L)),
    }


def value_loss(model: Any, batch: Batch) -> Metrics:
    values_L = torch.cat([plain_values(model, s) for s in batch.samples])
    old_L, returns_L = _flat(batch.old_values), _flat(batch.returns)
    near_L = torch.minimum(torch.maximum(values_L, old_L - CLIP_VALUE), old_L + CLIP_VALUE)
    errors_L = torch.stack([(values_L - returns_L) ** 2, (near_L - returns_L) ** 2])
    return {"loss": errors_L.amax(0).mean() / 2, "value_mean": values_L.mean()}


def plain_run(model: Any, loss: Loss, batches: Sequence[Batch], max_grad_norm: float) -> PlainRun:
    """Train with fp32 masters: AdamW, weight decay 0.1 on matrices, none on norms and biases.
    What needs no gradient stays as it is."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: p.detach().float().clone() for name, p in named.items()}
    before = {name: p.clone() for name, p in masters.items()}
    optimizer = _adamw(masters)
    steps, average = [], dict(before)
    for batch, rate, decay in zip(batches, RATES, (2 / 11, DECAY, DECAY), strict=True):
        metrics = loss(model, batch)
        metrics["loss"].backward()
        for name, p in named.items():
            masters[name].grad = (
                torch.zeros_like(masters[name]) if p.grad is None else p.grad.float()
            )
            p.grad = None
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(masters[name])
                average[name] = decay * average[name] + (1 - decay) * masters[name]
        steps.append(PlainStep({name: x.item() for name, x in metrics.items()}, norm.item()))
    after = {name: p.detach().float() for name, p in named.items()}
    return PlainRun(tuple(steps), before, after, average)


def _adamw(masters: Mapping[str, Tensor]) -> torch.optim.AdamW:
    vectors = ("norm.weight", "bias", "sinks", "magnitude_vector.default.weight")
    plain = [p for name, p in masters.items() if name.endswith(vectors)]
    decayed = [p for name, p in masters.items() if not name.endswith(vectors)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-4)


def saved_weights(directory: Path) -> Weights:
    """The tensors of a model's or an adapter's directory, as fp32 (exact for bfloat16)."""
    (file,) = directory.glob("*.safetensors")
    return {n: t.float() for n, t in load_file(file).items()}


def distance(got: Weights, run: PlainRun) -> float:
    """Return how far the trained weights are from the reference's, as a share of the way that the
    reference went: |got - after| / |after - before|, of the worst tensor.
    """
    assert got.keys() == run.after.keys()
    return max(
        float((got[n] - run.after[n]).norm() / (run.after[n] - run.before[n]).norm()) for n in got
    )


def whole_distance(got: Weights, run: PlainRun) -> float:
    """Return the `distance` of all tensors together: for bfloat16, where single vectors barely
    move."""
    assert got.keys() == run.after.keys()
    wrong = sum(float((got[n] - run.after[n]).square().sum()) for n in got)
    way = sum(float((run.after[n] - run.before[n]).square().sum()) for n in got)
    return float((wrong / way) ** 0.5)


def summed(results: Sequence[Sequence[UpdateResult]]) -> list[dict[str, float]]:
    """Every step's metrics, added over the ranks; results: one sequence of steps per rank."""
    return [
        {name: sum(r.metrics[name] for r in step) for name in step[0].metrics}
        for step in zip(*results, strict=True)
    ]


def worst_error(results: Sequence[Sequence[UpdateResult]], run: PlainRun) -> float:
    """The largest difference of a metric or a gradient norm, relative to max(1, the value)."""
    errors = []
    for got, step, want in zip(summed(results), zip(*results, strict=True), run.steps, strict=True):
        assert want.metrics.keys() <= got.keys()
        errors += [_relative(got[name], value) for name, value in want.metrics.items()]
        errors += [_relative(rank.grad_norm, want.grad_norm) for rank in step]
    return max(errors)


def _relative(got: float, want: float) -> float:
    return abs(got - want) / max(1.0, abs(want))
