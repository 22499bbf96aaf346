"""Fixtures for tests of the engine: rank processes, which take seconds to start, and models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_cases import write_mixture, write_model
from ranks import RankProcesses


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
    """Start as many ranks as the test's own parameter says."""
    found: RankProcesses = request.getfixturevalue("one_rank" if ranks == 1 else "two_ranks")
    return found


@pytest.fixture(scope="session")
def card_rank() -> Iterator[RankProcesses]:
    """One rank on this machine's first card."""
    processes = RankProcesses(1, "cuda")
    yield processes
    processes.kill()


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose output head is the embedding."""
    return write_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a head of its own."""
    return write_model(tmp_path_factory.mktemp("models") / "untied", tied=False)


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts."""
    return write_mixture(tmp_path_factory.mktemp("models") / "mixture")
