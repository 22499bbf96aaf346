"""Tests on the card of host memory, which a process has from its start: `make test-card`."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakecard.library import why_not
from rank_fixtures import card_rank as card_rank
from rank_fixtures import one_rank as one_rank
from rank_fixtures import tied as tied
from rank_fixtures import untied as untied


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests; skip them in a process without the card."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.card)
            if why_not():
                item.add_marker(pytest.mark.skip(reason=why_not()))
