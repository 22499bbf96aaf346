"""The policy model: a Hugging Face decoder reads a pack, and its head returns log-probs.

The file also defines the teacher model and the names of weights. It writes directories that
transformers and vLLM load, with the tokenizer, its chat template and the generation config. In
memory transformers keeps the experts of a mixture stacked, under other names than in files.
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
from plimsoll.model.older_files import add_older_settings
from plimsoll.model.sending import Arrays, send
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
        generation: the generation config; None for a model that scores.
        added_end: the end of the template's turns, if the model's own files do not name it as an
            end of responses.
    """

    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig | None
    added_end: str | None = None


def companions(
    lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, template: str | None
) -> Companions:
    """Return the companions of a trained model.

    Args:
        lm: the trained model.
        tokenizer: the tokenizer of the model that training began with, newly read.
        template: the Jinja template of training, which becomes the tokenizer's. None: training
            used the tokenizer's own. The end of its turns becomes an end token of generation.
            `none`: training used no template.
    """
    generation = deepcopy(lm.generation_config) if lm.can_generate() else None
    if template == "none":
        return Companions(tokenizer, generation)
    if template is not None:
        tokenizer.chat_template = template
    end = None if generation is None else make_template(tokenizer, template, None).turn_end()
    if generation is None or end is None:
        return Companions(tokenizer, generation)
    ends, token = generation.eos_token_id, int(tokenizer.convert_tokens_to_ids(end))
    generation.eos_token_id = _with_end(ends, token)
    known = generation.eos_token_id == ends or token == tokenizer.eos_token_id
    return Companions(tokenizer, generation, None if known else end)


def _with_end(ends: int | list[int] | None, token: int) -> int | list[int]:
    """Return the ends with a further token; a single end stays a number, as in most files."""
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if token in known:
        return token if ends == token else known
    return [*known, token] if known else token


def write_generation(generation: GenerationConfig, directory: Path) -> None:
    """Write generation_config.json unchanged.

    `save_pretrained` would refuse settings of which transformers only warns when it reads them.
    Llama 2 was published with such settings.
    """
    generation.to_json_file(directory / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])


WRAPPER = "lm."
"""The prefix of the parameter names of a PolicyModel or ValueModel."""


@dataclass(frozen=True)
class PackTensors:
    """A `records.Pack` on a device; that class describes the fields, with a worked example.

    All tensors are int64 except cu_loss_tokens [S + 1], which is int32.
    """

    tokens_T: Tensor
    positions_T: Tensor
    layout: PackLayout
    predictor_L: Tensor
    targets_L: Tensor
    cu_loss_tokens: Tensor

    @classmethod
    def from_pack(cls, pack: Pack, device: torch.device) -> PackTensors:
        """Return the pack on the device; its arrays may be read-only views of Ray's store."""
        return cls.with_columns(pack, {}, device)[0]

    @classmethod
    def with_columns(
        cls, pack: Pack, columns: Arrays, device: torch.device
    ) -> tuple[PackTensors, dict[str, Tensor]]:
        """Return the pack and further arrays on the device, which cross in one copy; see `send`."""
        arrays: dict[str, NDArray[Any]] = {
            "tokens_T": pack.tokens_T,
            "positions_T": pack.positions_T,
            "predictor_L": pack.predictor_L,
            "targets_L": pack.targets_L,
            "cu_loss_tokens": pack.cu_loss_tokens,
        }
        own = {**arrays, **layout_arrays(pack.cu_seqlens, pack.shared_S)}
        sent = send({**own, **columns}, device)
        layout = PackLayout.over(pack.cu_seqlens, pack.shared_S, sent)
        tensors = cls(layout=layout, **{name: sent[name] for name in arrays})
        return tensors, {name: sent[name] for name in sent.keys() - own.keys()}


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
        """Return log-probs of targets_L, and entropies if asked for, in fp32; shape [L].

        They are at the sampling temperature. With a lesson, return the loss on the lesson instead,
        at temperature 1.
        """
        head = self.lm.get_output_embeddings()
        with add_noise(self.lm.get_input_embeddings(), noise):
            states_L_H = predictor_states(self.lm, pack)
        output: TokenLogprobs | Distilled | Tensor
        output = head(states_L_H, pack.targets_L, entropy, lesson)
        return output

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

    def tied_names(self) -> dict[str, str]:
        """Return the tied names: {Hugging Face name: name under which its tensor is kept}."""
        kept = {parameter: name for name, parameter in self.lm.named_parameters()}
        every = self.lm.named_parameters(remove_duplicate=False)
        tied = {name: kept[parameter] for name, parameter in every if name != kept[parameter]}
        return {plain_name(name): plain_name(of) for name, of in tied.items()}


def predictor_states(lm: PreTrainedModel, pack: PackTensors) -> Tensor:
    """Return the hidden states that predict the learned tokens, [L, H], without the head."""
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
    """A causal language model that returns hidden states; its own head is never run.

    The student's head computes the logits of both, chunk by chunk (see distillation.py).

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
    """Return {name in the module: Hugging Face name} of a model's parameters.

    Tied parameters occur once. The parameters of adapters are left out; a layer that an adapter
    wraps has the name that it has without the adapter.
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

    `config` is `model.lm.config`; its entry `architectures` names the class of the weights. `state`
    has the full tensors by Hugging Face name, on any device. Of tied tensors (the same storage
    under several names) only the first is written; transformers ties them again as it loads. Raises
    PlimsollError with the path if the disk is full or not writable.
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
        add_older_settings(partial)
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
    """Yield (name, tensor) of all weights, named and split up as in the model's files.

    `weights` has the full tensors as the model in memory has them, by Hugging Face name. It is
    emptied layer by layer, because some yielded tensors are copies. Others share memory.
    """
    for names in _by_layer(weights):
        layer = {name: weights.pop(name) for name in names}
        yield from revert_weight_conversion(lm, layer).items()


def weights_for_files(lm: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `published_weights` as a dict; no two tensors share memory, as files require."""
    whole = set(weights)
    return {n: t if n in whole else t.clone() for n, t in published_weights(lm, weights)}


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that the files of a PolicyModel or ValueModel hold, by Hugging Face name.

    They are not trained by gradients; a router's biases are an example.
    """
    buffers = dict(module.named_buffers())
    return {plain_name(name): buffers[name] for name in module.state_dict() if name in buffers}


def _by_layer(names: Iterable[str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.match(name)
        groups.setdefault(layer[0] if layer else "", []).append(name)
    return list(groups.values())
