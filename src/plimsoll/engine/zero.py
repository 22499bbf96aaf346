"""The engine on DeepSpeed ZeRO: stages 0 to 3, offload, fp32 masters, clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.config.deepspeed import deepspeed_settings, frozen_settings
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.model import ModelConfig
from plimsoll.engine.checkpoint import Form, check_form, write_form
from plimsoll.engine.process_group import Place
from plimsoll.engine.protocol import parameter_groups
from plimsoll.errors import PlimsollError
from plimsoll.model.quantization import plain_shape


class ZeroEngine:
    """A trained role, divided by DeepSpeed as its `zero` settings say."""

    def __init__(self, module: nn.Module, role: TrainedRole, place: Place) -> None:
        import deepspeed

        self._role = role
        self._place = place
        settings = deepspeed_settings(role, place.device, place.ranks)
        optimizer = _optimizer(module, role)  # groups by the parameters' shapes: before dividing
        if role.zero.stage == 3:
            _divide(module, role.model, settings, place)
        else:
            _settle(module, role.model, place.torch_device)
        self._engine: Any = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings, dist_init_required=False
        )[0]
        self.module = module
        if role.adapter is not None:
            module.register_state_dict_post_hook(_keep_trained)
        _forget_dry_step(self._engine.optimizer)

    def forward(self, *inputs: object) -> Any:
        return self._engine(*inputs)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        self._engine.eval()
        with torch.no_grad():
            yield
        self._engine.train()
        if self._role.zero.stage == 3:
            # After training, DeepSpeed keeps up to stage3_max_reuse_distance weights whole for a
            # backward pass, which scoring has none of.
            self._engine.optimizer.empty_partition_cache()

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages gradients over the ranks; shares of a global mean must be added.
        self._engine.backward(loss * self._place.ranks, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> float:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = self._plain_norm()
        if norm is None:  # then DeepSpeed takes it, and leaves out a step that is not finite
            self._engine.step()
            return _finite(float(self._engine.get_global_grad_norm()))
        _finite(norm)
        self._engine.step()
        return norm

    def masters(self) -> list[Tensor]:
        """What this rank's optimizer updates: at stages 1 and 2 its share, in fp32."""
        groups = self._engine.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def _plain_norm(self) -> float | None:
        """The gradient norm at stage 0 in fp32, where DeepSpeed leaves the optimizer as it is and
        reports none: taken once the gradients are reduced, just before the update.
        """
        if self._role.zero.stage > 0 or self._role.model.dtype != "float32":
            return None
        # Not allreduce_gradients(), which reduces only while DeepSpeed's own step() runs.
        self._engine.buffered_allreduce_fallback()
        self._engine.enable_backward_allreduce = False  # step() must not reduce once more
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    @contextmanager
    def gathered(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        with _gathered(self.module, names, self._role.zero.stage) as tensors:
            yield tensors

    def save(self, directory: Path) -> None:
        self._engine.save_checkpoint(
            str(directory), tag="zero", exclude_frozen_parameters=self._role.adapter is not None
        )
        if self._place.rank == 0:
            write_form(Form.of(self._role, self._place.ranks), directory)

    def restore(self, directory: Path) -> None:
        check_form(Form.of(self._role, self._place.ranks), directory)
        self._engine.load_checkpoint(
            str(directory), tag="zero", load_module_strict=self._role.adapter is None
        )


class FrozenEngine:
    """A role that only scores: a whole copy on every rank, or divided by ZeRO stage 3; on the
    device always, or while it scores."""

    def __init__(self, module: nn.Module, role: FrozenRole, place: Place) -> None:
        module.requires_grad_(False).eval()
        self.module = module
        self._stage = role.stage
        self._call: Any = module
        self._visit: Callable[[], AbstractContextManager[None]] = nullcontext
        if role.stage == 0 and role.offload == "cpu":
            self._visit = partial(
                _visit,
                _parked(module, role.model, place),
                partial(Tensor.to, device=place.torch_device, non_blocking=True),
            )
        elif role.stage == 0:
            _settle(module, role.model, place.torch_device)
        else:
            import deepspeed

            settings = frozen_settings(role, place.device, place.ranks)
            _divide(module, role.model, settings, place)
            self._call = deepspeed.initialize(
                model=module, config=settings, dist_init_required=False
            )[0]

    def forward(self, *inputs: object) -> Any:
        return self._call(*inputs)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        with torch.no_grad(), self._visit():
            yield

    @contextmanager
    def gathered(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        with _gathered(self.module, names, self._stage) as tensors:
            yield tensors


def _settle(module: nn.Module, model: ModelConfig, device: torch.device) -> None:
    """Take the weights from the files that they are mapped from to the device, one by one."""
    _move_buffers(module, device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device, getattr(torch, model.dtype))


def _divide(
    module: nn.Module, model: ModelConfig, settings: dict[str, object], place: Place
) -> None:
    """Take the weights from the files that they are mapped from to the device, one by one, each
    divided at once over the ranks. DeepSpeed's `initialize` alone would move the whole model to
    every device first.
    """
    import deepspeed

    _move_buffers(module, place.torch_device)
    parameters: list[Any] = list(module.parameters())
    first, *rest = parameters
    first.data = first.data.to(getattr(torch, model.dtype))
    deepspeed.zero.Init(module=nn.ParameterList([first]), config_dict_or_path=settings)
    for parameter in rest:
        parameter.data = parameter.data.to(getattr(torch, model.dtype))
        first.convert_to_zero_parameters(param_list=[parameter])


def _parked(module: nn.Module, model: ModelConfig, place: Place) -> list[nn.Parameter]:
    """The parameters, left in host memory; pinned, where that makes the way to a GPU faster."""
    _settle(module, model, torch.device("cpu"))
    _move_buffers(module, place.torch_device)
    for parameter in module.parameters():
        if place.device == "cuda":
            parameter.data = parameter.data.pin_memory()
    return list(module.parameters())


@contextmanager
def _visit(
    parameters: Sequence[nn.Parameter], travel: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Within: the parameters where `travel` takes them: the device. Frozen weights do not change,
    so nothing is copied back: the host's own tensors take their place again."""
    homes = [parameter.data for parameter in parameters]
    try:
        for parameter, home in zip(parameters, homes, strict=True):
            parameter.data = travel(home)
        yield
    finally:
        for parameter, home in zip(parameters, homes, strict=True):
            parameter.data = home


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for buffer in module.buffers():
        buffer.data = buffer.to(device)


def _optimizer(module: nn.Module, role: TrainedRole) -> torch.optim.Optimizer:
    """AdamW over the module. The rate is set at every step; it starts at 0 because DeepSpeed may
    take a dry step to allocate the states, which must not decay the weights.
    """
    settings = role.optimizer
    groups = parameter_groups(module, settings.weight_decay)
    betas = (settings.beta1, settings.beta2)
    if role.zero.optimizer_offload == "cpu":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        offloaded: torch.optim.Optimizer = DeepSpeedCPUAdam(
            groups, lr=0.0, betas=betas, eps=settings.eps, adamw_mode=True
        )
        return offloaded
    if settings.kind == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        small: torch.optim.Optimizer = AdamW8bit(groups, lr=0.0, betas=betas, eps=settings.eps)
        return small
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=settings.eps, fused=True)


def _finite(norm: float) -> float:
    """The gradient norm, which must be a number.

    Raises:
        PlimsollError: it is not; the weights are still those before the step.
    """
    if not math.isfinite(norm):
        raise PlimsollError(
            f"the gradient norm is {norm}: a loss, a reward or an activation of this step is not "
            "finite. The weights were left as they were, and earlier checkpoints are whole. Look "
            "at the step's trajectories and metrics, lower the learning rate, or resume from the "
            "last checkpoint with another one"
        )
    return norm


def _forget_dry_step(optimizer: Any) -> None:
    """Start Adam's bias correction at step 0: at stage 0 in bf16 DeepSpeed allocates the moments by
    a step on zero gradients, which Adam would count and take its first real step too short.
    """
    for state in optimizer.optimizer.state.values() if hasattr(optimizer, "optimizer") else ():
        if "step" in state:
            state["step"] = (
                torch.zeros_like(state["step"]) if isinstance(state["step"], Tensor) else 0
            )


def _keep_trained(module: nn.Module, state: dict[str, Any], *_: object) -> None:
    """Leave in a model's state what is trained: a checkpoint of an adapter does without the base,
    which does not change.
    """
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    for name in state.keys() - trained:
        del state[name]


@contextmanager
def _gathered(module: nn.Module, names: Sequence[str], stage: int) -> Iterator[dict[str, Tensor]]:
    wanted = set(names)
    parameters = {n: p for n, p in module.named_parameters() if n in wanted}
    assert len(parameters) == len(wanted), f"no such parameters: {wanted - parameters.keys()}"
    if stage < 3:
        yield {name: parameters[name].detach() for name in names}
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        yield {name: parameters[name].detach() for name in names}


def plain_bytes(parameter: nn.Parameter) -> int:
    """The bytes of the whole parameter; of a quantised one, as a plain weight."""
    return math.prod(plain_shape(parameter)) * parameter.element_size()
