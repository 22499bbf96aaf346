"""What the tests of whole runs and of the engine share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_fixtures import card_rank as card_rank
from rank_fixtures import mixture as mixture
from rank_fixtures import one_rank as one_rank
from rank_fixtures import pool as pool
from rank_fixtures import tied as tied
from rank_fixtures import two_ranks as two_ranks
from rank_fixtures import untied as untied
from real_model import real_model


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
def smollm2() -> Path:
    """SmolLM2-135M-Instruct; without PyPI the test is skipped."""
    return real_model()
