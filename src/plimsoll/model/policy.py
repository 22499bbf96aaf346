"""The policy model: a Hugging Face decoder over a pack, then log-probs of the learned tokens.

The file also has its teacher, the names of its weights, and the writing of a directory that
transformers and vLLM load, with the tokenizer, its chat template and the generation config. In
memory transformers keeps the experts of a mixture stacked, under names of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import GENERATION_CONFIG_NAME

from plimsoll.data.template import make_template
from plimsoll.model.attention import PackLayout, layout_arrays
from plimsoll.model.checks import check_length
from plimsoll.model.distillation import Distilled, Lesson, distil
from plimsoll.model.logit_chunks import LogitForm
from plimsoll.model.noise import EmbeddingNoise, add_noise
from plimsoll.model.sending import send
from plimsoll.model.token_logprobs import (
    Entropy,
    Imitation,
    TokenLogprobs,
    token_logprobs,
    token_nll,
)
from plimsoll.records import Pack
from plimsoll.run.files import whole_directory


@dataclass(frozen=True, eq=False)
class Companions:
    """Files that are saved beside a model's weights.

    Attributes:
        tokenizer: the tokenizer, with the chat template that the model was trained with.
        generation: how the model generates; None for a model that scores.
    """

    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig | None


def companions(
    lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, template: str | None
) -> Companions:
    """Return the companions of a trained model.

    `tokenizer` is that of the model that training began with, newly read. `template` is the Jinja
    that the model was trained with instead of the tokenizer's own: the tokenizer gets it, and the
    token that ends its turns ends what the model generates.
    """
    generation = deepcopy(lm.generation_config) if lm.can_generate() else None
    if template is not None:
        tokenizer.chat_template = template
        end = make_template(tokenizer, template, None).turn_end()
        if generation is not None and end is not None:
            token = int(tokenizer.convert_tokens_to_ids(end))
            generation.eos_token_id = _with_end(generation.eos_token_id, token)
    return Companions(tokenizer, generation)


def _with_end(ends: int | list[int] | None, token: int) -> int | list[int]:
    """Return the ends with a further token; a single end stays a number, as in most files."""
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if token in known:
        return token if ends == token else known
    return [*known, token] if known else token


def write_generation(generation: GenerationConfig, directory: Path) -> None:
    """Write generation_config.json unchanged.

    `save_pretrained` refuses settings that transformers only warns of as it reads them, such as
    those that Llama 2 was published with.
    """
    generation.to_json_file(directory / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])


WRAPPER = "lm."
"""The prefix of the parameter names of a PolicyModel or ValueModel."""


@dataclass(frozen=True)
class PackTensors:
    """A `records.Pack` on a device; see there for the fields and a worked example.

    The tensors are int64, but cu_loss_tokens [S + 1], which is int32.
    """

    tokens_T: Tensor
    positions_T: Tensor
    layout: PackLayout
    predictor_L: Tensor
    targets_L: Tensor
    cu_loss_tokens: Tensor

    @classmethod
    def from_pack(cls, pack: Pack, device: torch.device) -> PackTensors:
        """Copy the pack's arrays (which may be read-only views of Ray's store) to the device."""
        arrays: dict[str, NDArray[Any]] = {
            "tokens_T": pack.tokens_T,
            "positions_T": pack.positions_T,
            "predictor_L": pack.predictor_L,
            "targets_L": pack.targets_L,
            "cu_loss_tokens": pack.cu_loss_tokens,
        }
        sent = send({**arrays, **layout_arrays(pack.cu_seqlens, pack.shared_S)}, device)
        layout = PackLayout.over(pack.cu_seqlens, pack.shared_S, sent)
        return cls(layout=layout, **{name: sent[name] for name in arrays})


@dataclass(frozen=True)
class HeadForm:
    """The form in which the head computes log-probabilities.

    Attributes:
        chunk: rows of logits that exist at once.
        logits: the model's own form of logits.
        temperature: the last divisor of the logits.
    """

    chunk: int
    logits: LogitForm = field(default_factory=LogitForm)
    temperature: float = 1.0


class TokenLogprobHead(nn.Module):
    """Takes the place and the parameters of the `lm_head` Linear; returns log-probs or a loss.

    It is a module of its own, so that ZeRO-3, which gathers a module's own parameters around its
    forward and backward, has the weight whole while it is used.
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
        """Return the log-probs of the targets; with a lesson, the loss that the lesson needs."""
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
        lm: the Hugging Face model, with packed attention; its output head is replaced in place, so
            its own forward and generate no longer work.
    """

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
        """Return log-probs (and entropies) of targets_L in fp32, at the sampling temperature.

        With a lesson, return the loss of the model at temperature 1 instead.
        """
        head = self.lm.get_output_embeddings()
        with add_noise(self.lm.get_input_embeddings(), noise):
            states_L_H = predictor_states(self.lm, pack)
        output: TokenLogprobs | Distilled | Tensor
        output = head(states_L_H, pack.targets_L, entropy, lesson)
        return output

    @contextmanager
    def at_temperature_one(self) -> Iterator[None]:
        """Compute log-probabilities at temperature 1 inside the block."""
        head = self.lm.get_output_embeddings()
        form = head.form
        head.form = replace(form, temperature=1.0)
        try:
            yield
        finally:
            head.form = form

    def tied_names(self) -> dict[str, str]:
        """Return {Hugging Face name: the kept name} for names that share another's tensor."""
        kept = {parameter: name for name, parameter in self.lm.named_parameters()}
        every = self.lm.named_parameters(remove_duplicate=False)
        tied = {name: kept[parameter] for name, parameter in every if name != kept[parameter]}
        return {plain_name(name): plain_name(of) for name, of in tied.items()}


def predictor_states(lm: PreTrainedModel, pack: PackTensors) -> Tensor:
    """Run only the decoder, and return the hidden states that predict learned tokens, [L, H]."""
    check_length(lm.config, pack.layout.most_keys)
    hidden_1TH = lm.get_decoder()(
        input_ids=pack.tokens_T[None],
        # Packed attention reads no mask. Without one, transformers looks for sequences in the
        # positions, and the host waits for the card (masking_utils, find_packed_sequence_indices).
        attention_mask=torch.ones_like(pack.tokens_T, dtype=torch.bool)[None],
        position_ids=pack.positions_T[None],
        use_cache=False,
        layout=pack.layout,
    ).last_hidden_state
    states_L_H: Tensor = hidden_1TH[0].index_select(0, pack.predictor_L)
    return states_L_H


class TeacherModel(nn.Module):
    """A causal language model whose own head is never run.

    Its student's head runs both, chunk by chunk (see distillation.py).

    Attributes:
        lm: the Hugging Face model, with packed attention.
        form: how its head's logits are computed.
    """

    def __init__(self, lm: PreTrainedModel, form: LogitForm) -> None:
        super().__init__()
        self.lm = lm
        self.form = form

    def forward(self, pack: PackTensors) -> Tensor:
        """Return the hidden states that predict learned tokens, shape [L, H]."""
        return predictor_states(self.lm, pack)

    def head_names(self) -> tuple[str, ...]:
        """Return the names of the head's weight and bias; a tied weight has the embedding's."""
        head = self.lm.get_output_embeddings()
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        parts = (head.weight, getattr(head, "bias", None))
        return tuple(names[id(part)] for part in parts if part is not None)


def hf_state_names(model: nn.Module) -> dict[str, str]:
    """Return {name in the module: Hugging Face name} of a model's parameters; tied ones come once.

    Adapters' own parameters have no such name; the layers that they wrap keep theirs.
    """
    names = (name for name, _ in model.named_parameters())
    return {name: plain_name(name) for name in names if not is_of_adapter(name)}


def is_of_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter; see `adapters.py`."""
    return ".lora_" in name


def plain_name(name: str) -> str:
    """Return the Hugging Face name of a parameter or buffer of a PolicyModel or ValueModel."""
    return name.removeprefix(WRAPPER).replace(".base_layer.", ".")


def save_hf(
    config: PreTrainedConfig,
    state: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None,
    directory: Path,
    generation_config: GenerationConfig | None = None,
) -> None:
    """Write a Hugging Face directory, whole or not at all, in place of an existing one.

    `config` is `model.lm.config`, whose architectures entry names the class of the weights. `state`
    has tensors by Hugging Face name, on any device. Of tied tensors (the same storage under several
    names) only the first is written; transformers ties them again as it loads. Raises PlimsollError
    with the path if the disk is full or not writable.
    """
    assert all(t.numel() > 0 for t in state.values()), "a sharded tensor was not gathered"
    tensors = _without_ties(state)
    saved_config = deepcopy(config)
    saved_config.dtype = next(iter(tensors.values())).dtype
    with whole_directory(Path(directory)) as partial:
        saved_config.save_pretrained(partial)
        save_torch_state_dict(tensors, partial, max_shard_size="5GB", metadata={"format": "pt"})
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        if generation_config is not None:
            write_generation(generation_config, partial)


def _without_ties(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    first: dict[tuple[torch.device, int], str] = {}
    for name, tensor in state.items():
        first.setdefault((tensor.device, tensor.data_ptr()), name)
    return {name: state[name] for name in first.values()}


_LAYER = re.compile(r".*?\.layers\.\d+\.")


def published_weights(
    lm: PreTrainedModel, weights: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights by the names and in the pieces of the model's files; some share their memory.

    `weights` are whole tensors by Hugging Face name. They are taken out layer by layer, as other
    pieces are copies.
    """
    for names in _by_layer(weights):
        layer = {name: weights.pop(name) for name in names}
        yield from revert_weight_conversion(lm, layer).items()


def weights_for_files(lm: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `published_weights` with memory of its own for each piece, as files need it."""
    whole = set(weights)
    return {n: t if n in whole else t.clone() for n, t in published_weights(lm, weights)}


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers in the files of a PolicyModel or ValueModel, by Hugging Face name.

    No gradient moves them; a router's biases are an example.
    """
    buffers = dict(module.named_buffers())
    return {plain_name(name): buffers[name] for name in module.state_dict() if name in buffers}


def _by_layer(names: Iterable[str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.match(name)
        groups.setdefault(layer[0] if layer else "", []).append(name)
    return list(groups.values())
