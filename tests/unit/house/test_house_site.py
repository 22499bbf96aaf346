"""The documentation builds as a site, without a broken link, and has what users look for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll.config.choice import built_in_names

PROJECT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    found = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    return folder


def test_the_first_page_is_the_readme_with_its_pictures(site: Path) -> None:
    text = (site / "index.html").read_text()
    assert "RLHF that knows its load line." in text
    assert 'src="watch.png"' in text and (site / "watch.png").exists()
    assert 'href="tutorials/sft.html"' in text


def test_every_page_of_docs_is_found_from_the_menu(site: Path) -> None:
    text = (site / "index.html").read_text()
    pages = [path.relative_to(PROJECT / "docs") for path in (PROJECT / "docs").rglob("*.md")]
    assert [p for p in pages if f'"{p.with_suffix(".html")}"' not in text] == []


def test_the_reference_has_each_policy_loss_with_its_options(site: Path) -> None:
    text = (site / "reference" / "algorithm.policy_loss.html").read_text()
    losses = built_in_names("plimsoll.algorithm.policy_loss")
    missing = [n for n in losses if f'id="plimsoll.algorithm.policy_loss.{n}"' not in text]
    assert missing == [] and "clip_low" in text


def test_examples_links_lead_to_pages_of_the_site(site: Path) -> None:
    text = (site / "examples" / "calculator" / "index.html").read_text()
    assert 'href="../../environments.html"' in text and 'src="curves.png"' in text
