"""Record which experts vLLM's worker takes for each token, where vLLM itself cannot.

vLLM 0.32 returns them (`enable_return_routed_experts`) with its second model runner alone, which
needs Triton, and so not on the CPU. Its routers have the same place for a callback in either runner
(`BaseRouter.set_capture_fn`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TakenExperts = tuple[Sequence[int], bytes]
"""A request's experts as they cross between processes: shape [tokens, layers, k], int16 values."""


class RoutingRecorder:
    """The experts of the tokens that a worker has computed, by request, until they are taken."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._layers: int = runner.model_config.get_total_num_hidden_layers()
        self._step: dict[int, Tensor] = {}
        self._pieces: dict[str, list[tuple[int, NDArray[np.int16]]]] = {}
        model = runner.get_model()
        for module in model.modules():
            if capture := getattr(getattr(module, "router", None), "set_capture_fn", None):
                capture(partial(self._step.__setitem__, module.layer_id))
        model.register_forward_hook(self._divide)

    def _divide(self, *_: object) -> None:
        """Divide the experts of a forward among the requests in its batch."""
        batch, step = self._runner.input_batch, self._step
        some = next(iter(step.values()))
        none = torch.zeros_like(some)  # of layers without experts
        rows_TLk = torch.stack([step.get(i, none) for i in range(self._layers)], 1).short().numpy()
        borders = self._runner.query_start_loc.np
        for i, request in enumerate(batch.req_ids):
            rows = rows_TLk[borders[i] : borders[i + 1]]
            begin = int(batch.num_computed_tokens_cpu[i])
            self._pieces.setdefault(request, []).append((begin, rows))
        step.clear()

    def take(self, number: str) -> TakenExperts:
        """Return the experts of all tokens of a request, and forget them.

        `number`: the request's id as vLLM got it, to which vLLM adds letters of its own.
        """
        [request] = [name for name in self._pieces if name.split("-")[0] == number]
        pieces = self._pieces.pop(request)
        end = max(begin + len(rows) for begin, rows in pieces)
        whole = np.zeros((end, *pieces[0][1].shape[1:]), np.int16)
        for begin, rows in pieces:  # a request that was set back is computed anew
            whole[begin : begin + len(rows)] = rows
        return whole.shape, whole.tobytes()


def routing_of(taken: TakenExperts) -> NDArray[np.int16]:
    """Return the array that crossed between processes."""
    shape, values = taken
    return np.frombuffer(values, np.int16).reshape(shape)
