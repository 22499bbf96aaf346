"""Runs on several nodes: each group on nodes of its own, and hosts with addresses of their own."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import (
    PPO,
    SFT,
    Command,
    column,
    metrics,
    run_here,
    wait_for,
    write_config,
    write_task,
)
from ray.cluster_utils import Cluster

from plimsoll.cluster.ray import RayCluster
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.reward import RewardConfig
from plimsoll.records import Prompt, single_turn
from plimsoll.reward.score import open_rewards

pytestmark = pytest.mark.engine

ENVIRONMENT = dict(os.environ)
"""As it is before runs in this process name their own network interface in it."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("nodes")
    write_task(home)
    config = copy.deepcopy(PPO)
    config["run"] |= {"steps": 2, "save_every": None, "eval_every": None}
    write_config(home, "ppo", config)
    return home


@pytest.fixture(scope="module")
def one_process(home: Path) -> list[dict[str, Any]]:
    outcome = run_here(home, "ppo", "ppo.yaml", "--run.directory", "local")
    assert outcome.code == 0, outcome.err
    return metrics(home / "local")


def flags(address: str, nodes: int, **own: int) -> tuple[str, ...]:
    groups = [(f"--cluster.own_nodes.{group}", str(count)) for group, count in own.items()]
    return (
        *("--cluster.where", "ray", "--cluster.address", address, "--cluster.critic_ranks", "1"),
        *("--cluster.device", "cpu"),  # where the build of torch is the one for GPUs, too
        *("--cluster.nodes", str(nodes), *(word for pair in groups for word in pair)),
    )


def test_actor_critic_and_engines_on_three_raylets_learn_as_one_process(
    home: Path,
    one_process: list[dict[str, Any]],
    three_raylets: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = noted_nodes(monkeypatch)
    apart = flags(three_raylets, 3, actor=1, critic=1, engines=1)
    outcome = run_here(home, "ppo", "ppo.yaml", "--run.directory", "apart", *apart)
    assert outcome.code == 0, outcome.err
    assert len(nodes) == len(set(nodes)) == 3
    assert metrics(home / "apart") == one_process


def noted_nodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the node of each rank and engine of a run, at its end."""
    nodes: list[str] = []
    close: Callable[[RayCluster], None] = RayCluster.close

    def note_nodes(cluster: RayCluster) -> None:
        nodes.extend(m.host.node_id for m in (*cluster._ranks, *cluster._engines))
        close(cluster)

    monkeypatch.setattr(RayCluster, "close", note_nodes)
    return nodes


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_nodes_after_one_is_lost(tmp_path: Path) -> None:
    write_task(tmp_path)
    config = copy.deepcopy(SFT)
    config["run"] = {"directory": "run", "steps": 40, "save_every": 2}
    write_config(tmp_path, "sft", config)
    cluster = Cluster()
    second = [cluster.add_node(num_cpus=1) for _ in range(2)][1]
    where = ("--cluster.where", "ray", "--cluster.address", cluster.address)
    nodes = ("--cluster.nodes", "2", "--cluster.ranks", "2", "--cluster.start_timeout", "30")
    words = ("sft", "sft.yaml", *where, *nodes, "--cluster.device", "cpu")
    command = Command(tmp_path, *words, supervised=True)
    try:
        saved = tmp_path / "run" / "checkpoints" / "step-000002"
        wait_for(saved.exists, "the first checkpoint")
        cluster.remove_node(second, allow_graceful=False)
        outcome = command.finish()
    finally:
        command.kill_all()
        cluster.shutdown()
    assert outcome.code == 0, outcome.err
    assert "--cluster.nodes 1 --cluster.ranks 1" in outcome.err
    assert column(metrics(tmp_path / "run"), "step") == [*range(1, 41)]


HOSTS = {"plimsoll-a": "10.213.77.1", "plimsoll-b": "10.213.77.2"}
"""Names and addresses of two network namespaces: hosts with no other way to each other."""


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip())


def on(host: str, *words: str) -> list[str]:
    return ["ip", "netns", "exec", host, *words]


@pytest.fixture
def two_hosts() -> Iterator[str]:
    """A Ray cluster of two hosts; the address of its head."""
    _remove_hosts()  # of a test that was killed
    first, second = HOSTS
    raylets: list[subprocess.Popen[bytes]] = []
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", "pl-a", "netns", first, "type", "veth", "peer", "pl-b", "netns", second)
        for (host, address), link in zip(HOSTS.items(), ("pl-a", "pl-b"), strict=True):
            ip("-n", host, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "set", link, "up")
    except OSError as error:
        _remove_hosts()
        pytest.skip(f"no network namespaces here: {error}")
    ray, head = str(Path(sys.executable).with_name("ray")), f"{HOSTS[first]}:6391"
    starts = ["--head", "--port", "6391", "--include-dashboard", "false"], ["--address", head]
    try:
        for (host, address), words in zip(HOSTS.items(), starts, strict=True):
            command = on(host, ray, "start", "--block", "--num-cpus", "2", *words)
            command += ["--node-ip-address", address, "--disable-usage-stats"]
            raylets.append(
                subprocess.Popen(
                    command,
                    env=ENVIRONMENT,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        yield head
    finally:
        for raylet in reversed(raylets):
            raylet.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                raylet.wait(60)
            raylet.kill()
        _remove_hosts()


def _remove_hosts() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True)


NOTING = """
import sys
from plimsoll.cli.command import main
from plimsoll.cluster.ray import RayCluster
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.reward import RewardConfig
from plimsoll.records import Prompt, single_turn
from plimsoll.reward.score import open_rewards
close = RayCluster.close
def note(cluster):
    print("ranks on", *(member.host.node for member in cluster._ranks))
    close(cluster)
RayCluster.close = note
sys.exit(main(sys.argv[1:]))
"""
"""The command, which also prints the addresses of its ranks."""


@pytest.mark.slow
def test_ranks_of_two_hosts_reach_each_other(
    home: Path, one_process: list[dict[str, Any]], two_hosts: str
) -> None:
    first, second = HOSTS.values()
    ranks = ("--cluster.ranks", "2", "--run.directory", "hosts", *flags(two_hosts, 2))
    command = on(next(iter(HOSTS)), sys.executable, "-c", NOTING, "ppo", "ppo.yaml", *ranks)
    done = subprocess.run(command, cwd=home, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"ranks on {first} {second} {first}" in done.stdout
    apart = metrics(home / "hosts")
    for name in ("reward", "kl", "value_loss", "critic/grad_norm", "actor/grad_norm"):
        expected = column(one_process, name)
        # Two ranks add gradients in another order.
        np.testing.assert_allclose(column(apart, name), expected, rtol=2e-2, atol=5e-3)


def test_rewards_in_processes_are_computed_on_all_nodes(
    three_raylets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after one of the nodes has lost its processes, which begin again."""
    monkeypatch.chdir(tmp_path)
    lines = "import os\n\ndef parent(trajectory):\n    return os.getppid()\n"
    (tmp_path / "my_rewards.py").write_text(lines)
    config = RewardConfig(name="my_rewards.py:parent", process=True)
    ids, logprobs = np.arange(2), np.zeros(2, np.float32)
    answers = [
        single_turn(Prompt(i, ids, ""), 0, ids, logprobs, "", "stop", 0, group=i) for i in range(24)
    ]
    settings = ClusterConfig(where="ray", device="cpu", address=three_raylets, nodes=3)
    with (
        contextlib.closing(RayCluster(settings, (), threads=1, device="cpu")) as cluster,
        open_rewards({"parent": config}) as here,
        cluster.reward_hosts() as hosts,
    ):
        scorer = here.on_hosts(hosts)
        before = [int(answer.reward) for answer in scorer(answers)]
        assert len(set(before)) == 3 and os.getpid() not in before
        os.kill(before[0], signal.SIGKILL)
        after = {int(answer.reward) for answer in scorer(answers)}
        assert before[0] not in after and len(after & {*before}) == 2
