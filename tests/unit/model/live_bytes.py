"""How many bytes of tensors live at once: proof of what a computation never holds."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operations make, and the most bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = weakref.ref(storage, lambda dead: self.live.pop(dead, None))
                self.live[reference] = storage.nbytes()
        self.peak = max(self.peak, sum(self.live.values()))
        return result
