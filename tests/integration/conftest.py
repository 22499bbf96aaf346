"""What the tests of the engine share: rank processes, which take seconds to start, and models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_cases import write_model
from ranks import RankProcesses
from real_model import real_model


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankProcesses]:
    processes = RankProcesses(1)
    yield processes
    processes.kill()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(2)
    yield processes
    processes.kill()


@pytest.fixture
def pool(ranks: int, request: pytest.FixtureRequest) -> RankProcesses:
    """As many ranks as the test's own parameter says."""
    found: RankProcesses = request.getfixturevalue("one_rank" if ranks == 1 else "two_ranks")
    return found


@pytest.fixture(scope="session")
def card_rank() -> Iterator[RankProcesses]:
    """One rank on this machine's first card."""
    processes = RankProcesses(1, "cuda")
    yield processes
    processes.kill()


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[tuple[str, ...]]:
    """A Ray of this machine for all runs that may join one: starting it takes seconds. What to add
    to their commands."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # as `start_ray` has it
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8})
    where = "--cluster.where", "ray", "--cluster.address", cluster.address
    yield *where, "--cluster.device", "cpu"  # where the build of torch is the one for GPUs, too
    cluster.shutdown()


@pytest.fixture
def three_raylets() -> Iterator[str]:
    """The address of a Ray of this machine with three nodes."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for _ in range(3):
        cluster.add_node(num_cpus=2)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose output head is the embedding."""
    return write_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a head of its own."""
    return write_model(tmp_path_factory.mktemp("models") / "untied", tied=False)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct; without PyPI the test is skipped."""
    return real_model()
