"""The policy, the teacher and the value model: Hugging Face decoders that read a pack, with heads.

The policy's head returns log-probs, and the value model's a number per token.

NEFTune adds noise to the input embeddings while training. Jain et al. 2023, algorithm 1,
https://arxiv.org/abs/2310.05914. Unlike in the paper, the noise of a sequence is scaled by the
sequence's length, not by that of a padded batch, and each sequence has a seed. So the gradient does
not depend on the sequence's neighbours in a pack, on the rank that computes it, or on whether the
run was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from plimsoll.model.attention import PackLayout, layout_arrays
from plimsoll.model.checks import check_length
from plimsoll.model.distillation import Distilled, Lesson, distil
from plimsoll.model.files import plain_name
from plimsoll.model.logit_chunks import LogitForm
from plimsoll.model.routers import Routing
from plimsoll.model.sending import send
from plimsoll.model.shards import PackShare, Shard, share_pack
from plimsoll.model.token_logprobs import (
    Entropy,
    Imitation,
    TokenLogprobs,
    token_logprobs,
    token_nll,
)
from plimsoll.records import Column, Ints, Pack, PackColumns


@dataclass(frozen=True)
class EmbeddingNoise:
    """The noise of a pack.

    Attributes:
        alpha: the strength.
        lengths_S: the length of each sequence.
        seeds_S: the seed of each sequence.
    """

    alpha: float
    lengths_S: tuple[int, ...]
    seeds_S: tuple[int, ...]

    def draw(self, width: int, device: torch.device) -> Tensor:
        """Return fp32 noise, [T, H], uniform within alpha / sqrt(length * width) for each token."""

        def noise(length: int, seed: int) -> Tensor:
            drawn = torch.Generator(device).manual_seed(seed)
            bound = self.alpha / (length * width) ** 0.5
            return torch.empty(length, width, device=device).uniform_(
                -bound, bound, generator=drawn
            )

        return torch.cat(list(map(noise, self.lengths_S, self.seeds_S)))


@contextmanager
def add_noise(
    embeddings: nn.Module, noise: EmbeddingNoise | None, share: PackShare | None = None
) -> Iterator[None]:
    """During the block, add noise to the embeddings that a pack gets, [1, T, H]; None: add none.

    `share`: the part of the pack whose embeddings they are; None: they are those of all tokens.

    The noise is added by a hook on the module's output. So it does not matter whether weights are
    divided, have an adapter, or layers are recomputed: the embeddings are computed once.
    """
    if noise is None:
        yield
        return

    def add(module: nn.Module, inputs: object, embedded_1TH: Tensor) -> Tensor:
        drawn_TH = noise.draw(embedded_1TH.shape[-1], embedded_1TH.device)
        drawn_TH = drawn_TH if share is None else share.take(drawn_TH)
        fills = embedded_1TH.shape[1] - len(drawn_TH)
        return embedded_1TH + pad(drawn_TH, (0, 0, 0, fills)).to(embedded_1TH.dtype)

    hook = embeddings.register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()


ReadAt = Callable[[Pack], Ints]
"""Returns the rows of a pack at which a model gives its output."""


def before_learned(pack: Pack) -> Ints:
    """Return the row of the token before each learned token, [L]: critics judge this state."""
    return pack.predictor_L


def at_ends(pack: Pack) -> Ints:
    """Return the row of each sequence's last token, [S]: reward models score responses there."""
    return pack.cu_seqlens[1:].astype(np.int64) - 1


def at_marks(pack: Pack) -> Ints:
    """Return the rows of the learned tokens themselves, [L].

    For a process reward model these tokens end the steps of solutions. No two sequences may share
    tokens.
    """
    return pack.predictor_L + 1


@dataclass(frozen=True)
class PackTensors:
    """A `records.Pack` on a device; that class describes the fields, with a worked example.

    All tensors are int64 except cu_loss_tokens [S + 1], which is int32, and those of `routing`.

    Attributes:
        predictors: `predictor_L` in host memory.
        routing: The experts that the sampler took, if the model is to take them too.
        share: What this rank computes of the pack, if several share it: then tokens, positions,
            layout, `predictor_L` and routing are its own (`divide`). None: they are the whole
            pack's.
    """

    tokens_T: Tensor
    positions_T: Tensor
    layout: PackLayout
    predictor_L: Tensor
    targets_L: Tensor
    cu_loss_tokens: Tensor
    predictors: Ints
    routing: Routing | None = None
    share: PackShare | None = None

    @classmethod
    def from_pack(
        cls, pack: Pack, device: torch.device, read_at: ReadAt = before_learned
    ) -> PackTensors:
        """Return the pack on the device; its arrays may be read-only views of Ray's store."""
        return cls.with_columns(pack, {}, device, read_at)[0]

    @classmethod
    def with_columns(
        cls,
        pack: Pack,
        columns: PackColumns,
        device: torch.device,
        read_at: ReadAt = before_learned,
    ) -> tuple[PackTensors, dict[Column, Tensor]]:
        """Return the pack and its columns on the device, which cross in one copy; see `send`.

        `read_at` chooses the rows at which the model gives its output.
        """
        predictors = read_at(pack)
        arrays: dict[str, NDArray[Any]] = {
            "tokens_T": pack.tokens_T.astype(np.int64),
            "positions_T": pack.positions_T,
            "predictor_L": predictors,
            "targets_L": pack.targets_L,
            "cu_loss_tokens": pack.cu_loss_tokens,
        }
        own = {**arrays, **layout_arrays(pack.cu_seqlens, pack.shared_S)}
        own |= {"routing_T": pack.routing_T}
        sent = send({**own, **columns}, device)
        layout = PackLayout.over(pack.cu_seqlens, pack.shared_S, sent)
        routing = Routing(sent["routing_T"]) if "routing_T" in sent else None
        of_pack = {name: sent[name] for name in arrays}
        tensors = cls(**of_pack, layout=layout, predictors=predictors, routing=routing, share=None)
        return tensors, {column: sent[column] for column in columns}

    def divide(self, shard: Shard | None) -> PackTensors:
        """Return what a shard computes of the pack; without one, the pack itself."""
        if shard is None:
            return self
        part = share_pack(self.layout, self.predictors, shard, self.tokens_T.device)
        return replace(
            self,
            tokens_T=part.take(self.tokens_T),
            positions_T=part.take(self.positions_T),
            layout=part.layout,
            predictor_L=part.predictor_L,
            routing=None if self.routing is None else self.routing.divide(part),
            share=part,
        )

    @property
    def own_targets_L(self) -> Tensor:
        """The targets that this rank's states predict, [own L]."""
        return self.targets_L if self.share is None else self.targets_L[self.share.own_L]

    def whole(self, own: Tensor) -> Tensor:
        """Return numbers of the whole pack, given this rank's; see `PackShare.whole`."""
        return own if self.share is None else self.share.whole(own)


@dataclass(frozen=True)
class HeadForm:
    """How the head computes log-probabilities.

    Attributes:
        chunk: the number of rows of logits that exist at once.
        logits: the model's own form of logits.
        temperature: the sampling temperature, by which the logits are divided last.
    """

    chunk: int
    logits: LogitForm = field(default_factory=LogitForm)
    temperature: float = 1.0


class TokenLogprobHead(nn.Module):
    """Replaces the `lm_head` Linear and keeps its parameters; returns log-probs or a loss.

    ZeRO-3 gathers a module's parameters for the module's forward and backward. So the head is a
    module, and its weight is gathered while it is used.
    """

    def __init__(self, head: nn.Linear, form: HeadForm) -> None:
        super().__init__()
        self.weight = head.weight
        self.bias = head.bias
        self.form = form

    def forward(
        self,
        hidden_L_H: Tensor,
        targets_L: Tensor,
        entropy: Entropy,
        lesson: Lesson | Imitation | None,
    ) -> TokenLogprobs | Distilled | Tensor:
        """Return the log-probs of the targets; with a lesson, the loss on the lesson instead."""
        where = (hidden_L_H, self.weight, targets_L)
        form, chunk, bias_V = self.form.logits, self.form.chunk, self.bias
        match lesson:
            case Lesson():
                return distil(*where, lesson, bias_V=bias_V, chunk=chunk, form=form)
            case Imitation():
                return token_nll(*where, lesson.tokens, bias_V=bias_V, chunk=chunk, form=form)
            case None:
                form = replace(form, scale=form.scale / self.form.temperature)
                return token_logprobs(
                    *where, bias_V=bias_V, chunk=chunk, form=form, entropy=entropy
                )


class PolicyModel(nn.Module):
    """A causal language model that returns log-probabilities of a pack's learned tokens.

    Attributes:
        lm: the Hugging Face model, with packed attention. Its output head is replaced in place, so
            `lm.forward` and `lm.generate` no longer work.
        shard: this rank's place among those that share packs; None: it computes whole packs.
    """

    shard: Shard | None = None

    def __init__(self, lm: PreTrainedModel, form: HeadForm) -> None:
        super().__init__()
        self.lm = lm
        lm.set_output_embeddings(TokenLogprobHead(lm.get_output_embeddings(), form))

    def forward(
        self,
        pack: PackTensors,
        entropy: Entropy = "none",
        noise: EmbeddingNoise | None = None,
        lesson: Lesson | Imitation | None = None,
    ) -> TokenLogprobs | Distilled | Tensor:
        """Return log-probs of targets_L, and entropies if asked for, in fp32; shape [L].

        They are at the sampling temperature. With a lesson, return the loss on the lesson instead,
        at temperature 1. All ranks that share the pack return the same.
        """
        head = self.lm.get_output_embeddings()
        own = _own_part(self, pack)
        with add_noise(self.lm.get_input_embeddings(), noise, own.share):
            states_L_H = predictor_states(self.lm, own)
        if own.routing is not None:
            own.routing.add_up()
        match output := head(states_L_H, own.own_targets_L, entropy, lesson):
            case TokenLogprobs(logprobs_L, entropy_L):
                if entropy_L is not None:
                    entropy_L = own.whole(entropy_L)
                return TokenLogprobs(own.whole(logprobs_L), entropy_L)
            case Distilled():
                return Distilled(*map(own.whole, output))
            case _:
                return own.whole(output)

    @contextmanager
    def at_temperature_one(self) -> Iterator[None]:
        """During the block, compute log-probabilities at temperature 1."""
        head = self.lm.get_output_embeddings()
        form = head.form
        head.form = replace(form, temperature=1.0)
        try:
            yield
        finally:
            head.form = form

    @cached_property
    def tied_names(self) -> dict[str, str]:
        """The tied names: {Hugging Face name: name under which its tensor is kept}."""
        kept = {parameter: name for name, parameter in self.lm.named_parameters()}
        every = self.lm.named_parameters(remove_duplicate=False)
        tied = {name: kept[parameter] for name, parameter in every if name != kept[parameter]}
        return {plain_name(name): plain_name(of) for name, of in tied.items()}


def _own_part(model: PolicyModel | TeacherModel | ValueModel, pack: PackTensors) -> PackTensors:
    """Return what this rank computes of a pack, after checking the whole pack's sequences."""
    check_length(model.lm.config, pack.layout.most_keys)
    return pack.divide(model.shard)


def predictor_states(lm: PreTrainedModel, pack: PackTensors) -> Tensor:
    """Return the hidden states at the rows of `predictor_L`, [L, H], without the head."""
    hidden_1TH = lm.get_decoder()(
        input_ids=pack.tokens_T[None],
        # Packed attention reads no mask. Without one, transformers looks for sequences in the
        # positions, and the host waits for the card (masking_utils, find_packed_sequence_indices).
        attention_mask=torch.ones_like(pack.tokens_T, dtype=torch.bool)[None],
        position_ids=pack.positions_T[None],
        use_cache=False,
        layout=pack.layout,
        **({} if pack.routing is None else {"routing": pack.routing}),
    ).last_hidden_state
    states_L_H: Tensor = hidden_1TH[0].index_select(0, pack.predictor_L)
    return states_L_H


class TeacherModel(nn.Module):
    """A causal language model that returns hidden states; its own head is never run.

    The student's head computes the logits of both, chunk by chunk (see distillation.py).

    Attributes:
        lm: the Hugging Face model, with packed attention.
        form: how its head's logits are computed.
        shard: as in `PolicyModel`.
    """

    shard: Shard | None = None

    def __init__(self, lm: PreTrainedModel, form: LogitForm) -> None:
        super().__init__()
        self.lm = lm
        self.form = form

    def forward(self, pack: PackTensors) -> Tensor:
        """Return the hidden states that predict learned tokens, shape [L, H].

        A rank that shares the pack returns those of its own rows, which its student's head needs.
        """
        return predictor_states(self.lm, _own_part(self, pack))

    def head_names(self) -> tuple[str, ...]:
        """Return the names of the head's weight and bias; a tied weight has the embedding's."""
        head = self.lm.get_output_embeddings()
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        parts = (head.weight, getattr(head, "bias", None))
        return tuple(names[id(part)] for part in parts if part is not None)


class ValueHead(nn.Module):
    """Replaces the one-label `score` Linear and keeps its weight; computes in fp32.

    In bfloat16 a value would have 8 bits, too few for differences between neighbouring tokens.
    """

    def __init__(self, score: nn.Linear) -> None:
        super().__init__()
        self.weight = score.weight

    def forward(self, hidden_L_H: Tensor) -> Tensor:
        """Return a value for each hidden state, shape [L]."""
        return hidden_L_H.float() @ self.weight[0].float()


class ValueModel(nn.Module):
    """A sequence-classification model with one label, read at every token before a learned one.

    values_L[i] is the value of the state before the i-th learned token.

    Attributes:
        lm: the Hugging Face model, with packed attention; saved under its own names (without
            `lm.`), AutoModelForSequenceClassification loads it with num_labels = 1.
        shard: as in `PolicyModel`.
    """

    shard: Shard | None = None

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        lm.score = ValueHead(lm.score)

    def forward(self, pack: PackTensors) -> Tensor:
        """Return values_L in fp32; all ranks that share the pack return the same."""
        own = _own_part(self, pack)
        values_L: Tensor = self.lm.score(predictor_states(self.lm, own))
        return own.whole(values_L)


def initialise_score(score: nn.Linear, seed: int) -> None:
    """Draw small weights with standard deviation 1 / (hidden + 1), so that values start near 0.

    Stiennon et al. 2020 (https://arxiv.org/abs/2009.01325) initialise the reward head in this way.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = score.in_features
    drawn = torch.randn(1, hidden, generator=generator) / (hidden + 1)
    with torch.no_grad():
        score.weight.copy_(drawn)
