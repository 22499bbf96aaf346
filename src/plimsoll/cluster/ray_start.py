"""Start Ray or join it: with a token, without its messages and its handling of signals.

Each Ray that a run starts has an authentication token of its own; a run that joins a cluster takes
the cluster's.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import psutil
import ray
from ray._private import ray_constants, services, utils
from ray._private.node import Node
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError

from plimsoll.cluster.ray_access import check_reachable, make_ray_folder
from plimsoll.config.base import AUTO
from plimsoll.config.cluster import ClusterConfig, Device, OwnNodes, device_of
from plimsoll.errors import ConfigError, NodesMissing, PlimsollError
from plimsoll.machine.processes import end_processes
from plimsoll.run.output import silence, tell

_MODE, _TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
_STANDARD_ERROR = 2


def start_ray(config: ClusterConfig) -> None:
    """Start Ray on this machine, or join `cluster.address`; do nothing the second time.

    Raises:
        ConfigError: Nothing answers at the address.
        PlimsollError: Ray cannot start on this machine.
    """
    if ray.is_initialized():
        return
    # Collect handles of an earlier Ray of this process now. Collected later, they would give up
    # actors of this Ray, which get the same ids.
    gc.collect()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if config.address is None:
        # Ray would keep 3.6 KB for each of the last 100,000 calls, for a dashboard that is off.
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        # Ray would start a process for every core, to wait for tasks; a run has none.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        # Ray would run ranks and engines at nice 15, behind the run's own rewards and all else.
        os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray prints reports of dead workers whatever log_to_driver says; Plimsoll's errors name them.
    ray._private.worker._worker_logs_enabled = False
    try:
        if config.address is not None and config.address != AUTO:
            check_reachable(config.address)
        try:
            _begin(config)
        except Exception as error:
            # On a busy machine: Ray waits for its node for 30 s (ray/_private/node.py).
            if "timed out during startup" not in str(error):
                raise
            tell("Ray did not start within 30 s on this busy machine: once more")
            ray.shutdown()
            _begin(config)
    except Exception as error:  # Ray raises plain exceptions, too
        if config.address is None:
            raise PlimsollError(
                f"Ray cannot start on this machine: {error}\n"
                "It needs RAY_TMPDIR, TMPDIR or /tmp, the first that is set, for its sessions and "
                "sockets: a short path that can be written to; and room for its threads (ulimit "
                "-u) and addresses (ulimit -v). `plimsoll doctor` looks at all of them."
            ) from error
        raise ConfigError(
            f"cluster.address: no Ray cluster answers at {config.address!r} ({error}). Write "
            "host:port of its head node, and join it with this machine (`ray start --address`) and "
            "the head's ~/.ray/auth_token; or leave it out to run on this machine alone."
        ) from error


def _begin(config: ClusterConfig) -> None:
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(authentication(config.address))
        enter(_keep_signal_handler())
        # Start Ray's processes in process groups of their own. `timeout`, Slurm and terminals send
        # signals to the command's group. SIGTERM would end Ray's processes, but the command needs
        # them until it has saved.
        own_group = partial(services.ConsolePopen, process_group=0)
        enter(_with_attributes(services, ConsolePopen=own_group))
        if config.address is None:
            # Let all processes listen on 127.0.0.1 only. Ray does so by itself where it cannot have
            # several nodes; `ray.init` takes no such argument.
            enter(_with_attributes(ray_constants, ENABLE_RAY_CLUSTER=False))
            # Start no autoscaler, log forwarder and API server. A Ray of one run on one machine
            # uses none of them, and `include_dashboard` leaves the API server running. Together
            # they took 4 of the 7.5 CPU seconds of a start, and 270 MB.
            for start in ("start_monitor", "start_log_monitor"):
                enter(_with_attributes(Node, **{start: lambda node: None}))
            enter(_with_attributes(services, start_api_server=lambda *_, **options: (None, None)))
        enter(_end_children_on_error())
        ray.init(
            address=config.address or "local",
            include_dashboard=None if config.address else False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=None if config.address else make_ray_folder(),
        )


def device_of_joined_cluster(config: ClusterConfig, engines: int) -> Device:
    """Join the cluster and return the run's device, checked against the GPUs that Ray counts.

    This machine, which may be the cluster's head, need not have a GPU. Prints a note if a run on
    CPUs leaves GPUs of the cluster idle.

    Raises:
        ConfigError: The config asks for CUDA, and the cluster has no GPU.
    """
    start_ray(config)
    wait_for_nodes(config, engines)
    gpus = ray.cluster_resources().get("GPU", 0)
    if config.device == "cuda" and gpus == 0:
        raise ConfigError(
            "cluster.device is cuda, and Ray counts no GPU in the cluster at "
            f"{config.address}. Write `cpu`, or join machines with GPUs to it (`ray start`)."
        )
    if config.device == "cpu" and gpus > 0:
        tell(f"the run computes on CPUs and leaves {gpus:.0f} GPUs of the cluster alone")
    return device_of(config)


def wait_for_nodes(config: ClusterConfig, engines: int) -> list[str]:
    """Wait for the run's nodes; return Ray's ids of them: this node first, the others by address.

    Raises:
        PlimsollError: Too few nodes have joined within `cluster.start_timeout`.
    """
    deadline, has_told_user = time.monotonic() + config.start_timeout, False
    while len(nodes := [node for node in ray.nodes() if node["Alive"]]) < config.nodes:
        here = f"the Ray cluster at {config.address} has {len(nodes)} of {config.nodes} nodes"
        here += f" ({', '.join(node['NodeManagerAddress'] for node in nodes)})"
        if time.monotonic() > deadline:
            raise NodesMissing(
                f"{here} (cluster.nodes) after {config.start_timeout:.0f} s "
                "(cluster.start_timeout). Start Ray on the others, or lower cluster.nodes",
                _flags_for(config, len(nodes), engines),
            )
        if not has_told_user:
            tell(f"{here}: waiting for the others")
            has_told_user = True
        time.sleep(0.5)
    this_node = ray.get_runtime_context().get_node_id()
    nodes.sort(key=lambda node: (node["NodeID"] != this_node, node["NodeManagerAddress"]))
    return [node["NodeID"] for node in nodes[: config.nodes]]


def _flags_for(config: ClusterConfig, nodes: int, engines: int) -> tuple[str, ...]:
    """Return the flags with which a run needs no more than so many nodes; () if it has groups.

    Each node keeps as many ranks and engines as it had.
    """
    if config.own_nodes != OwnNodes() or config.own_ranks:
        return ()
    numbers = {"cluster.ranks": config.ranks, "rollout.engines": engines}
    fewer = {key: max(1, number * nodes // config.nodes) for key, number in numbers.items()}
    flags = {"cluster.nodes": nodes} | {k: n for k, n in fewer.items() if n < numbers[k]}
    return tuple(word for key, number in flags.items() for word in (f"--{key}", str(number)))


@contextmanager
def _with_attributes(owner: Any, **values: object) -> Iterator[None]:
    """Give a module or a class of Ray other attributes during the block."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def _keep_signal_handler() -> Iterator[None]:
    """Keep the run's SIGTERM handler, which saves first, while Ray starts inside the block.

    Without this, Ray replaces the handler twice: by an immediate exit, then by an abort in C++.
    """
    try:
        with _with_attributes(utils, set_sigterm_handler=lambda handler: None):
            yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


@contextmanager
def _end_children_on_error() -> Iterator[None]:
    """End the processes that Ray has started if an error leaves the block.

    Ray forgets them if Ctrl-C comes between two of its lines.
    """
    this_process = psutil.Process()
    before = set(this_process.children())
    try:
        yield
    except BaseException:
        end_processes([child.pid for child in this_process.children() if child not in before])
        raise


@contextmanager
def authentication(address: str | None) -> Iterator[None]:
    """Choose Ray's authentication while a Ray starts, or is joined at `address`, inside the block.

    - A Ray that starts gets a token of its own, unless the environment names one. Ray would write
      a new one to ~/.ray: two runs may do so at once, and HOME may refuse it.
    - A cluster gets the token of the environment or of ~/.ray if it asks for one, and not
      otherwise. With a token, this command would ask for it, too, and the processes of a cluster
      without could not call it back. Ray looks at ~/.ray, not at the cluster.

    Afterwards the environment is as it was: the next Ray of this process may differ.

    Raises:
        AuthenticationError: The cluster asks for a token that this machine does not have.
    """
    before = {name: os.environ.get(name) for name in (_MODE, _TOKEN)}
    logging.getLogger("ray").setLevel(logging.ERROR)  # it logs a line about the token
    try:
        if address is None:
            os.environ.setdefault(_TOKEN, secrets.token_hex(32))
        elif address != AUTO:
            os.environ[_MODE] = "token" if _asks_for_token(address) else "disabled"
        _read_environment()
        yield
    except BaseException:
        _restore(before)
        _read_environment()  # Ray ends the process if it is to send a token that is not there
        raise
    _restore(before)


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _asks_for_token(address: str) -> bool:
    os.environ[_MODE] = "disabled"
    _read_environment()
    standard_error = os.dup(_STANDARD_ERROR)
    silence(_STANDARD_ERROR)  # the client warns of the token that is not sent
    try:
        GcsClient(address=address).internal_kv_keys(b"", None)
    except AuthenticationError:
        return True
    finally:
        os.dup2(standard_error, _STANDARD_ERROR)
        os.close(standard_error)
    return False


def _read_environment() -> None:
    """Let Ray's C++ code read mode and token again; it keeps them as long as the process lives."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
