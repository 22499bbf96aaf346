"""The maps for who changes the project name only files that are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll.shapes.known_models import read_shape

PROJECT = Path(__file__).parents[3]
SOURCE = PROJECT / "src" / "plimsoll"


def gone(text: str) -> Iterator[str]:
    """Files and folders in backticks that are neither in the source nor in the project; of a name
    without a folder, those that no folder of the source has."""
    for name in re.findall(r"`([\w/*]+(?:\.py|\.json|/))`", text):
        found = [*SOURCE.glob(name), *SOURCE.parent.glob(name), *PROJECT.glob(name)]
        if not found and ("/" in name or not [*SOURCE.rglob(name)]):
            yield name


def test_the_search_finds_what_it_should() -> None:
    text = (
        "`cli/jobs.py`, `jobs.py`, `resolve/rules/*.py`, `reward/` and `tests/unit/`; `cli/jib.py`"
    )
    assert list(gone(f"{text}, `jib.py`, `rewards/`")) == ["cli/jib.py", "jib.py", "rewards/"]


def test_the_page_of_what_to_add_where() -> None:
    page = (PROJECT / "notes" / "changing.md").read_text()
    assert list(gone(page)) == []


def test_the_way_from_a_config_to_a_verdict() -> None:
    """What it names, such as `verdict_of` (`memory/contents/stores.py`), is there, and its numbers
    are the plan's."""
    way = (PROJECT / "notes" / "changing.md").read_text().partition("## From a config to a")[2]
    named = re.findall(r"`(\w+)`\s+\(`([\w/]+\.py)`\)", way)
    assert len(named) == 10
    for name, file in named:
        assert re.search(rf"^(def|class) {name}\b", (SOURCE / file).read_text(), re.MULTILINE), name
    parameters = read_shape("Qwen/Qwen2.5-7B").parameters
    assert f"{parameters:,} parameters" in way
    assert f"{8 * parameters / 8 / 1e9:.2f} GB" in way


def test_the_tree_of_the_source() -> None:
    """A line that names no folder goes on with that of the line before."""
    tree = (PROJECT / "README.md").read_text().partition("\nsrc/plimsoll/\n")[2].partition("```")[0]
    folders = re.split(r"^  (\w+/)? *", tree.partition("  records.py")[0], flags=re.MULTILINE)
    folder, named = "", []
    for name, line in zip(folders[1::2], folders[2::2], strict=True):
        folder = name or folder
        named += [folder + file for file in re.findall(r"\b\w+\.py\b", line)]
    assert len(named) > 12
    assert [name for name in named if not (SOURCE / name).exists()] == []


def pages() -> list[Path]:
    folders = [PROJECT / name for name in ("docs", "notes", "examples", "benchmarks")]
    found = [path for folder in folders for path in folder.rglob("*.md")]
    return sorted([PROJECT / "README.md", *found])


OF_THE_PROJECT = re.compile(r"\b((?:benchmarks|tests|examples)/[\w/]+\.(?:py|csv|yaml|md|sh))\b")
OTHERS = {"my_module.py", "jobs/NAME.py", "jobs/NAME_loop.py", "tensorboard/", "gpu_worker.py"}
"""Files that a reader writes, a run makes or vLLM has, and patterns of names."""


@pytest.mark.parametrize(
    "page",
    [page for page in pages() if page != PROJECT / "notes" / "performance.md"],
    ids=lambda path: str(path.relative_to(PROJECT)),
)
def test_pages_name_only_files_that_are_there(page: Path) -> None:
    """Beside the page and in the examples, too; the files of JSON are a run's. Only what is told
    of the past may name what is no more."""
    text = page.read_text()
    named = {name for name in gone(text) if not name.endswith(".json")} - OTHERS
    elsewhere = (page.parent, *(PROJECT / "examples").iterdir())
    assert [name for name in named if not any((one / name).exists() for one in elsewhere)] == []
    assert [file for file in OF_THE_PROJECT.findall(text) if not (PROJECT / file).exists()] == []


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(PROJECT)))
def test_links_between_pages_hold(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", without_code(page)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        anchors = anchors_of(target) if target.suffix == ".md" and target.exists() else {anchor}
        if not target.exists() or (anchor and anchor not in anchors):
            broken.append(link)
    assert broken == []


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


def test_figures_of_performance_are_short_and_their_history_is_kept() -> None:
    figures = (PROJECT / "docs" / "performance.md").read_text()
    assert len(figures.split()) <= 2000
    assert "](../notes/performance.md)" in figures
