"""`ProcessGroupNCCL` by gloo: on tensors of the card alone, and on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fakecard.library import library
from fakecard.streams import on_stream

_unfinished: list[Work] = []
"""What this rank has begun and others may not have joined yet."""


def synchronize(device: Any = None) -> None:
    """Wait for all that was begun, as `torch.cuda.synchronize` does."""
    while _unfinished:
        _unfinished[0].wait()
    library().fc_sync_device()


class Work:
    """A collective that was begun. It keeps its tensors until somebody waits for it, as NCCL's."""

    def __init__(self, stream: int, tensors: Any, outputs: Any, begun: Any) -> None:
        self._stream, self._kept, self._outputs, self._begun = stream, tensors, outputs, begun
        if begun is not None:
            _unfinished.append(self)

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait; the host waits only for what gloo needs to be right."""
        if self._begun is not None:
            self._begun.wait()
            self._begun = None
            _unfinished.remove(self)
        library().fc_wait_stream(library().fc_get_stream(), self._stream)
        self._kept = None
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        """Return True: a host that asks does not wait."""
        return True

    def get_future(self) -> Any:
        """Return the outputs in a future."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class NcclOptions:
    """`ProcessGroupNCCL.Options`."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        groups: Any = dist.distributed_c10d
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = groups.default_pg_nccl_timeout
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.config = SimpleNamespace()


_ProcessGroup: Any = dist.ProcessGroup  # whose types overload most names


class ProcessGroupNCCL(_ProcessGroup):  # type: ignore[misc]
    """The collectives that Plimsoll, DeepSpeed and torch ask of NCCL."""

    Options = NcclOptions

    def __init__(
        self, store: Any, rank: int, size: int, options: NcclOptions | None = None
    ) -> None:
        super().__init__(rank, size)
        self.options = options or NcclOptions()
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, self.options._timeout)
        self._stream = int(library().fc_new_stream())
        self._number, self._ranks = rank, size
        self.bound_device_id = None
        self.supports_splitting = False

    # What torch asks of any process group.
    def name(self) -> str:
        return "nccl"

    getBackendName = name

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_backend(self, device: Any) -> Any:
        return self

    def _has_hooks(self) -> bool:
        return False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    def shutdown(self) -> None:
        """Do nothing: gloo has no watchdog."""

    abort = shutdown

    def _run(
        self, name: str, reads: Any, writes: Any, call: Callable[[Any], Any], later: bool = False
    ) -> Work:
        """Run a collective on the group's stream, behind what the current stream has been given.

        Args:
            name: of the collective, for messages.
            reads, writes: the card's tensors.
            call: takes the host's view of any of them, and returns gloo's work, or None if gloo
                has done it.
            later: the host goes on before the other ranks have come, as with NCCL.
        """
        for tensor in tree_leaves((reads, writes)):
            if not tensor.is_cuda:
                raise RuntimeError(f"No backend type associated with device type cpu ({name})")
            if not tensor.is_contiguous():
                raise RuntimeError(f"Tensors must be contiguous ({name})")
        library().fc_wait_stream(self._stream, library().fc_get_stream())
        with on_stream(self._stream), torch.no_grad():
            for tensor in tree_leaves(reads):
                torch.ops.fakecard.touch(tensor, False, f"nccl {name}")
            for tensor in tree_leaves(writes):
                torch.ops.fakecard.touch(tensor, True, f"nccl {name}")
            begun = call(partial(tree_map_only, Tensor, torch.ops.fakecard.alias))
            if begun is not None and not later:
                begun.wait()
        return Work(self._stream, (reads, writes), writes, begun if later else None)

    def _reduce(self, tensor: Tensor, operation: Any) -> None:
        """Reduce a tensor of the host over all ranks, in place. gloo has no averages."""
        options: Any = dist.AllreduceOptions()
        average = operation == dist.ReduceOp.AVG
        options.reduceOp = dist.ReduceOp.SUM if average else operation
        self._gloo.allreduce([tensor], options).wait()
        if average:
            tensor /= self._ranks

    def allreduce(self, tensors: Any, options: Any = None) -> Work:
        def call(on_host: Any) -> None:
            for tensor in tree_leaves(on_host(tensors)):
                self._reduce(tensor, _operation(options))

        return self._run("all_reduce", tensors, tensors, call)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, options: Any = None) -> Work:
        if isinstance(options, int):
            root, options = options, dist.BroadcastOptions()
            options.rootRank = root
        given = tree_leaves(tensors)
        reads, writes = (given, []) if options.rootRank == self._number else ([], given)
        return self._run(
            "broadcast", reads, writes, lambda h: self._gloo.broadcast(h(given), options), True
        )

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Work:
        return self._run(
            "all_gather", inputs, outputs, lambda h: self._gloo.allgather(h(outputs), h(inputs))
        )

    def all_gather_single(self, output: Tensor, source: Tensor, options: Any = None) -> Work:
        def call(on_host: Any) -> Any:
            parts = on_host(output).view(-1).split(source.numel())
            return self._gloo.allgather([[*parts]], [on_host(source).view(-1).clone()])

        return self._run("all_gather_into_tensor", source, output, call)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Work:
        works = map(self.all_gather_single, outputs, inputs)
        return [*works][-1]

    def reduce_scatter_single(self, output: Tensor, source: Tensor, options: Any = None) -> Work:
        def call(on_host: Any) -> None:
            everything = on_host(source).clone().view(-1)
            self._reduce(everything, _operation(options))
            on_host(output).view(-1).copy_(everything.split(output.numel())[self._number])

        return self._run("reduce_scatter_tensor", source, output, call)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, options: Any = None
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return [self.reduce_scatter_single(*pair, options) for pair in pairs][-1]

    def reduce(self, tensors: Any, options: Any = None) -> Work:
        def call(on_host: Any) -> None:
            for tensor in on_host(tensors):
                copy = tensor.clone()
                self._reduce(copy, _operation(options))
                if options.rootRank == self._number:
                    tensor.copy_(copy)

        return self._run("reduce", tensors, tensors, call)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, to: Any, of: Any, options: Any = None
    ) -> Work:
        return self._run(
            "all_to_all_single",
            source,
            output,
            lambda h: self._gloo.alltoall_base(h(output), h(source), to, of),
        )

    def barrier(self, options: Any = None, **_: Any) -> Work:
        self._gloo.barrier().wait()
        library().fc_sync_stream(library().fc_get_stream())
        return Work(self._stream, None, [], None)

    def send(self, tensors: Any, rank: int, tag: int = 0) -> Work:
        return self._run(
            "send", tensors, [], lambda h: self._gloo.send(h(tensors), rank, tag), True
        )

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> Work:
        return self._run(
            "recv", [], tensors, lambda h: self._gloo.recv(h(tensors), rank, tag), True
        )


def _operation(options: Any) -> Any:
    return dist.ReduceOp.SUM if options is None else options.reduceOp
