"""A card made of host memory: CUDA code runs on a machine without a GPU.

It gives the CPU build of PyTorch a device `cuda` whose memory is the host's and whose kernels are
the CPU's. All that lies above kernels is real: tensors on `cuda:0`, an allocator with a capacity,
device guards, autograd's threads, streams, events, pinned memory, CUDA IPC between processes, and
process groups of the type `nccl` (gloo computes). A process has the card from its start, because
the library must be loaded before torch: `make test-card` sets PYTHONPATH to `every_process/`.

What it shows:
- Tensors of the host where the card's are needed; wrong constructors, pinning, dtypes, layouts.
- A stream that reads what another has not made, or memory that is freed while a stream uses it.
  Each operation counts on its stream's clock (vector clocks); a test fails if a use has not waited.
- Host memory that is read before its copy is there: until the host waits for the copy, the bytes
  are 0xEE. Pinned memory that is overwritten while the card has still to read it: an upload is
  done as late as CUDA may do it.
- Waits of the host for the card, by `set_sync_debug_mode` and `stat("syncs")`.
- Allocations that fail: any one by its number (`fail_at`), or those above a capacity.
- Bytes of the card and of pinned memory that stay, memory that other processes have still to
  release, and CUDA IPC of growing segments.

What it cannot show:
- Kernels: their numbers, their speed, and which of them PyTorch chooses. SDPA is plain products,
  flash attention a reference. cuBLAS, cuDNN, Triton's compiler, bitsandbytes and CUDA graphs are
  not there, and neither is vLLM on a card.
- The allocator's cache and its gaps: reserved bytes are the highest of the allocated ones.
- NCCL itself: what hangs, aborts, its watchdog, topologies and versions.
- The driver: rights, MIG, NVML's samples.
- Orders other than the program's. An operation is done when the host asks for it, so a race is
  reported and not run. Races with host code that reads memory through NumPy show only as 0xEE.
  The streams of another process are unknown.

A process has one allocator for all its cards: the bytes of a rank are those of its own card.
"""
