"""Packed attention: sequences side by side in one row, each seeing only itself.

Registered with transformers' AttentionInterface under two names, so that the model's own config
carries the choice and any decoder that uses the interface works:

- `plimsoll_sdpa`: scaled_dot_product_attention, sequence by sequence. Runs everywhere, in any
  dtype, with sliding windows and with softcapped scores (Gemma 2).
- `plimsoll_varlen`: torch.nn.attention.varlen.varlen_attn, one kernel for the whole pack. CUDA
  in bfloat16, with sliding windows; it has no softcap.

Both read what transformers passes down for packed input: `cu_seq_lens_q` (int32, shape [S + 1],
the sequences' borders) and `max_length_q` (int). No mask is ever built for the whole pack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from plimsoll.errors import ConfigError

SDPA = "plimsoll_sdpa"
VARLEN = "plimsoll_varlen"


@dataclass(frozen=True, eq=False)
class _Pack:
    """What one layer attends over: query [1, heads, T, D]; key, value [1, kv heads, T, D].

    cu_seq_lens: the sequences' borders, int32, shape [S + 1]. window: how many keys a query sees,
    itself among them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seq_lens: Tensor
    max_length: int
    scaling: float | None
    window: int | None
    softcap: float | None


def register_packed_attention() -> None:
    """Make both names known to transformers. Calling it again changes nothing."""
    for name, kernel in ((SDPA, _sdpa), (VARLEN, _varlen)):
        AttentionInterface.register(name, partial(_attend, kernel))
        AttentionMaskInterface.register(name, _no_mask)


def _no_mask(*_: object, **__: object) -> None:
    """The borders of the sequences say it all."""


def _attend(
    kernel: Callable[[_Pack], Tensor],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The function that transformers calls, with its names; gives [1, T, heads, D]."""
    _refuse_unknown(attention_mask, dropout, s_aux)
    pack = _Pack(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window, softcap)
    return kernel(pack), None


def _sdpa(pack: _Pack) -> Tensor:
    lengths: list[int] = pack.cu_seq_lens.diff().tolist()
    # split and cat: the backward pass of slices adds every one into a gradient of full size.
    parts = (x.split(lengths, 2) for x in (pack.query, pack.key, pack.value))
    outputs = [_one_sequence(q, k, v, pack).transpose(1, 2) for q, k, v in zip(*parts, strict=True)]
    return torch.cat(outputs, dim=1)


def _one_sequence(query: Tensor, key: Tensor, value: Tensor, pack: _Pack) -> Tensor:
    length, window = query.shape[2], pack.window
    bites = window is not None and length > window
    if pack.softcap is not None:
        mask = _window_mask(length, window if bites else None, query.device)
        return _softcapped(query, key, value, mask, pack.scaling, pack.softcap)
    band = _window_mask(length, window, query.device) if bites else None
    return scaled_dot_product_attention(
        query, key, value, attn_mask=band, is_causal=not bites, scale=pack.scaling, enable_gqa=True
    )


@lru_cache(maxsize=8)
def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """True where a query may look: at itself and the window - 1 keys before it."""
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    return causal if window is None else causal.triu_(1 - window)


def forget_window_masks() -> None:
    """Drop the kept masks: one that was made of fake tensors must not meet real ones."""
    _window_mask.cache_clear()


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, softcap: float
) -> Tensor:
    """softmax(cap * tanh(scores / cap)) @ value with the scores in fp32; no kernel has it."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = grouped.float() @ key.float().transpose(2, 3).unsqueeze(2) * scale
    scores = (scores / softcap).tanh() * softcap
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(value.dtype)
    output: Tensor = (weights @ value.unsqueeze(2)).flatten(1, 2)
    return output


def _varlen(pack: _Pack) -> Tensor:
    assert pack.softcap is None, "load refuses varlen for a model with softcapped attention"
    output_THD = varlen_attn(
        pack.query[0].transpose(0, 1),
        pack.key[0].transpose(0, 1),
        pack.value[0].transpose(0, 1),
        pack.cu_seq_lens,
        pack.cu_seq_lens,
        pack.max_length,
        pack.max_length,
        scale=pack.scaling,
        # It counts the keys before the query, without itself.
        window_size=(-1 if pack.window is None else pack.window - 1, 0),
        enable_gqa=pack.query.shape[1] != pack.key.shape[1],
    )
    assert isinstance(output_THD, Tensor)
    return output_THD[None]


def _refuse_unknown(mask: Tensor | None, dropout: float, sinks: Tensor | None) -> None:
    """What would be computed wrongly if it were passed over."""
    if mask is not None or dropout or sinks is not None:
        raise ConfigError(
            "packed attention got something that it cannot compute: "
            f"a mask: {mask is not None}, dropout: {dropout}, attention sinks: {sinks is not None}."
            " Packs need neither mask nor dropout; models with attention sinks are not supported."
        )
