"""A teacher: a decoder that gives what its head reads, and the head for others to read with."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from plimsoll.model.logit_chunks import LogitForm
from plimsoll.model.policy import PackTensors, predictor_states


class TeacherModel(nn.Module):
    """A causal language model whose own head is never run: its student's head runs both, chunk by
    chunk (see distillation.py).

    lm: the Hugging Face model, with packed attention. form: how its head's logits are computed.
    """

    def __init__(self, lm: PreTrainedModel, form: LogitForm) -> None:
        super().__init__()
        self.lm = lm
        self.form = form

    def forward(self, pack: PackTensors) -> Tensor:
        """The hidden states that predict learned tokens, shape [L, H]."""
        return predictor_states(self.lm, pack)

    def head_names(self) -> tuple[str, ...]:
        """The names of the head's weight and, if it has one, its bias; of a tied head, the
        embedding's."""
        head = self.lm.get_output_embeddings()
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        parts = (head.weight, getattr(head, "bias", None))
        return tuple(names[id(part)] for part in parts if part is not None)
