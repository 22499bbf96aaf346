"""A role's largest micro-batch, traced on its true architecture, beside what the plan says of it.

Nothing is loaded: models are built of fake tensors, from their config.json alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from plimsoll.config.cluster import decided_exchange
from plimsoll.config.engine import AdapterConfig, ModelConfig
from plimsoll.errors import ConfigError
from plimsoll.memory.contents.contents import micro_batch
from plimsoll.model.adapters import add_adapter
from plimsoll.model.attention import SDPA, PackLayout, register_packed_attention
from plimsoll.model.checks import logit_softcap
from plimsoll.model.load import prepare_layers
from plimsoll.model.logit_chunks import LogitForm
from plimsoll.model.policy import HeadForm, PackTensors, PolicyModel, ValueModel
from plimsoll.model.price.activations import activation_items
from plimsoll.model.price.form import activation_form
from plimsoll.model.routers import Routing, follow_sampler, freeze_routers
from plimsoll.model.shards import Shard
from plimsoll.model.token_logprobs import Entropy, Imitation
from plimsoll.resolve.roles import HeadKind, RoleName
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.shapes.known_models import find_shape, read_fields
from plimsoll.shapes.shape import MicroBatch, ModelShape
from traced_bytes import Traced, trace

_HEAD_ROWS = 256  # the head works row by row; more of them would only make the trace longer


@dataclass(frozen=True)
class TracedRole:
    """A traced micro-batch, and the bytes that the plan's formulas give its activations.

    Both are of PyTorch's own attention kernels on a CPU, of unquantised weights, of layer inputs
    that stay where they are and of at most 256 learned tokens, whatever the config says.
    """

    work: MicroBatch
    traced: Traced
    predicted_activations: int

    @property
    def error(self) -> float:
        """Return the error of the formulas as a share of the traced bytes; below 0 they predict too
        little."""
        return self.predicted_activations / self.traced.activations - 1


@dataclass(frozen=True)
class TraceForm:
    """What of a role is traced. entropy, temperature: of a policy's head. imitates: it learns the
    likelihood of tokens, not by their log-probs. freezes: routers stay as they are. routed: tokens
    take a sampler's experts."""

    model: ModelConfig
    adapter: AdapterConfig | None
    head: HeadKind
    trained: bool
    entropy: bool = False
    temperature: float = 1.0
    imitates: bool = False
    freezes: bool = False
    routed: bool = False


def trace_activations(spec: RunSpec[Any], role: RoleName) -> TracedRole:
    """Trace a role's largest micro-batch; takes seconds.

    Raises ConfigError for a role that the job lacks and a model whose shape is not known.
    """
    forms = _forms(spec)
    if role not in forms:
        raise ConfigError(f"this job has no role {role!r} to trace. It has {', '.join(forms)}.")
    shards = spec.shards_of(role)
    streams, exchange = spec.ranks_of(role) // shards, decided_exchange(spec.cluster)
    work = micro_batch(spec.workload, streams, shards, exchange)
    return trace_form(forms[role], replace(work, loss_tokens=min(work.loss_tokens, _HEAD_ROWS)))


def trace_form(form: TraceForm, work: MicroBatch) -> TracedRole:
    """Trace a micro-batch, and reckon it. Raises ConfigError as `trace_activations`."""
    plain = {"attention": "sdpa", "quantization": "none", "activation_offload": "none"}
    model = form.model.model_copy(update=plain)
    shape = find_shape(model.path)
    hf_config = _hf_config(model.path)
    build = _builder(replace(form, model=model), hf_config, work)
    reckoned = activation_form(
        model, form.adapter, shape, form.head, "cpu", form.entropy, form.temperature != 1
    )
    items = activation_items(
        "traced",
        shape,
        work,
        replace(reckoned, trained=form.trained, trains_routers=not form.freezes),
        "train_actor",
    )
    every = model.checkpoint_every if model.gradient_checkpointing else 1
    traced = trace(build, shape.layers, _depths(hf_config, shape, work, every))
    return TracedRole(work, traced, sum(held.item.bytes for held in items))


def _hf_config(path: str) -> PreTrainedConfig:
    """Return the config of a model, or of the language model in a model that also sees."""
    fields: Any = read_fields(path)[1]
    return AutoConfig.for_model(**fields.get("text_config", fields))


def _forms(spec: RunSpec[Any]) -> dict[RoleName, TraceForm]:
    sampling = spec.sampling
    temperature = 1.0 if sampling is None else sampling.rollout.sampling.temperature
    policy, imitates = sampling is not None, spec.job.name == "sft"
    trained = {
        name: TraceForm(
            role.model, role.adapter, spec.roles[name].head, True, policy, temperature, imitates
        )
        for name, role in spec.trained.items()
    }
    frozen = {
        name: TraceForm(role.model, None, spec.roles[name].head, False, temperature=temperature)
        for name, role in spec.frozen.items()
    }
    return trained | frozen


def _depths(
    config: PreTrainedConfig, shape: ModelShape, work: MicroBatch, every: int
) -> tuple[int, int]:
    """One and two periods of the pattern of layers, where their windows matter, and of checkpoints:
    at both depths the last layer is the like of the whole's. What is between them are no layers
    without experts, where only the first ones have none."""
    period = lcm(every, _window_period(config, shape, work))
    first = shape.layers % period or period
    dense = max(0, getattr(config, "first_k_dense_replace", 0) - 1)  # the layers after have experts
    first += dense if first > 1 else period + dense
    return first, first + period


def _window_period(config: PreTrainedConfig, shape: ModelShape, work: MicroBatch) -> int:
    window = shape.sliding_window
    kinds = getattr(config, "layer_types", None) or [""]
    if window is None or work.longest <= window or len(set(kinds)) == 1:
        return 1
    alike = (n for n in range(1, len(kinds)) if all(k == kinds[i % n] for i, k in enumerate(kinds)))
    return next(alike, len(kinds))


def _builder(
    form: TraceForm, config: PreTrainedConfig, work: MicroBatch
) -> Callable[[int], MicroBatchStep]:
    register_packed_attention()

    def build(depth: int) -> MicroBatchStep:
        with torch.device("meta"):
            module = _module(form, _of_depth(config, depth), work)
        return MicroBatchStep(module, work, form)

    return build


def _layout(work: MicroBatch) -> PackLayout:
    """As many sequences of the longest length as there is room for, and the rest in one; where
    they may share, pairs instead, of which the second goes on from nearly its middle."""
    prompt = max(0, work.longest // 2 - 1)
    pair = [(prompt + 1, 0), (work.longest - prompt, prompt)]
    group = pair if work.shared else [(work.longest, 0)]
    whole = work.tokens * work.shards
    count, rest = divmod(whole, sum(own for own, _ in group))
    own, shared = zip(*count * group, *[(rest, 0)] * bool(rest), strict=True)
    borders = np.cumsum([0, *own], dtype=np.int32)
    return PackLayout.of(borders, np.array(shared), torch.device("cpu"))


def _of_depth(config: PreTrainedConfig, depth: int) -> PreTrainedConfig:
    """A copy with so many layers, whose kinds follow the pattern of the whole."""
    shallow = type(config)(**config.to_dict())
    shallow.num_hidden_layers = depth
    if kinds := getattr(config, "layer_types", None):
        shallow.layer_types = [kinds[i % len(kinds)] for i in range(depth)]
    return shallow


def _module(
    form: TraceForm, config: PreTrainedConfig, work: MicroBatch
) -> PolicyModel | ValueModel:
    settings: dict[str, Any] = {
        "dtype": getattr(torch, form.model.dtype),
        "attn_implementation": SDPA,
    }
    module: PolicyModel | ValueModel
    cpu = torch.device("cpu")
    if form.head == "policy":
        lm = AutoModelForCausalLM.from_config(config, **settings)
        rows = prepare_layers(lm, form.model, cpu)
        logits = LogitForm(softcap=logit_softcap(config), rows=rows)
        head = HeadForm(form.model.head_chunk, logits, form.temperature)
        module = PolicyModel(lm, head)
    else:
        config.num_labels = 1
        lm = AutoModelForSequenceClassification.from_config(config, **settings)
        prepare_layers(lm, form.model, cpu)
        module = ValueModel(lm)
    if form.freezes:
        freeze_routers(module)
    if form.routed:
        follow_sampler(lm)
    if form.adapter is not None:
        add_adapter(module, form.adapter, form.model.path, seed=0)
    elif not form.trained:
        module.requires_grad_(False)
    if work.shards > 1:
        module.shard = _FakeShard(0, work.shards, work.exchange)
    return module.train(form.trained)


class _FakeShard(Shard):
    """One of several ranks, of which the others are not there: tensors have shapes alone."""

    def swap(self, sent: Tensor) -> Tensor:
        return torch.empty_like(sent, memory_format=torch.contiguous_format)

    def gather(self, own: Tensor) -> Tensor:
        own = own.contiguous()
        return own.new_empty((self.count * len(own), *own.shape[1:]))

    def add(self, own: Tensor) -> Tensor:
        return own.clone()


@dataclass(frozen=True)
class MicroBatchStep:
    """A forward and backward in three stretches: up to the loss, the layers, the embedding."""

    module: PolicyModel | ValueModel
    work: MicroBatch
    form: TraceForm

    def run(self, enter: Callable[[str], None]) -> None:
        lm = self.module.lm
        marks = [
            (lm.get_decoder(), lambda out: out.last_hidden_state, "layers"),
            (lm.get_input_embeddings(), lambda out: out, "embedding"),
        ]
        hooks = [_mark(module, of, enter, name) for module, of, name in marks]
        pack = self._pack()
        enter("forward")
        with torch.set_grad_enabled(self.form.trained):
            loss = self._loss(pack)
        if self.form.trained:
            loss.backward()
        for hook in hooks:
            hook.remove()

    def _loss(self, pack: PackTensors) -> Tensor:
        if isinstance(self.module, ValueModel):
            values_L: Tensor = self.module(pack)
            return values_L.sum()
        if self.form.imitates:
            mean: Tensor = self.module(pack, lesson=Imitation(self.work.loss_tokens))
            return mean
        entropy: Entropy = "loss" if self.form.entropy else "none"
        outputs: list[Tensor | None] = self.module(pack, entropy)
        return torch.stack([each.sum() for each in outputs if each is not None]).sum()

    def _pack(self) -> PackTensors:
        tokens, loss_tokens = self.work.tokens * self.work.shards, self.work.loss_tokens
        layout = _layout(self.work)
        return PackTensors(
            tokens_T=torch.zeros(tokens, dtype=torch.int64),
            positions_T=torch.zeros(tokens, dtype=torch.int64),
            layout=layout,
            predictor_L=torch.zeros(loss_tokens, dtype=torch.int64),
            targets_L=torch.zeros(loss_tokens, dtype=torch.int64),
            cu_loss_tokens=torch.zeros(len(layout.own) + 1, dtype=torch.int32),
            predictors=np.zeros(loss_tokens, np.int64),
            routing=self._routing() if self.form.routed else None,
        )

    def _routing(self) -> Routing:
        config = self.module.lm.config
        experts = self.work.tokens, config.num_hidden_layers, config.num_experts_per_tok
        return Routing(torch.zeros(experts, dtype=torch.uint8))


def _mark(
    module: nn.Module, of: Callable[[Any], Tensor], enter: Callable[[str], None], name: str
) -> Any:
    """Enter a stretch when the gradient of what the module gave is known."""

    def watch(_: nn.Module, __: Any, output: Any) -> None:
        if of(output).requires_grad:
            of(output).register_hook(lambda gradient: enter(name))

    return module.register_forward_hook(watch)
