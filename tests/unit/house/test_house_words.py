"""Every flag and key that the documents, the examples and the source name exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll.config.keys import find_key, keys_of
from plimsoll.jobs import JOBS
from plimsoll.resolve.load import load_spec
from plimsoll_convert.openrlhf.table import FLAGS
from plimsoll_convert.verl.table import FAMILIES, SETTINGS

PROJECT = Path(__file__).parents[3]
NAMES = "|".join(JOBS)
KEYS = tuple(key for job in JOBS.values() for key in keys_of(job.config))
SECTIONS = sorted({key.path[0] for key in KEYS})

# A flag with dots, such as --run.steps; a key within a sentence, such as `run.steps` or
# run.steps: 3 (but no file such as run.yaml, and no name within a longer one).
FLAG = re.compile(r"(?<![\w.-])--([a-z_]+(?:\.[a-z_0-9<>]+)+)")
KEY = re.compile(rf"(?<![\w./{{-])((?:{'|'.join(SECTIONS)})(?:\.[a-z_0-9]+)+)(?![\w(/])")
FILES = re.compile(r"\.(py|yaml|yml|json|jsonl|parquet|md|html|txt|csv|svg|png|lock|log)$")
PLACEHOLDERS = {"a.b.c", "section.key", "reward_model.ground_truth"}
"""Of commands in general, and of verl's columns."""
OF_OPENRLHF = {
    word.rpartition(":")[2] for flag in FLAGS for word in [*flag.dotted.split(), flag.id]
}
OF_VERL = {name for one in SETTINGS for name in (one.name, *one.older)}
OF_VERL |= {prefix for prefixes, _ in FAMILIES for prefix in prefixes}
OF_OTHERS = OF_OPENRLHF | {".".join(name.split(".")[:n]) for name in OF_VERL for n in range(2, 9)}
"""Flags and keys of other trainers, which the tables that read them name, and verl's sections."""
YAML_BLOCK = re.compile(rf"```ya?ml\n(# ({NAMES})\b.*?)```", re.DOTALL)


def documents() -> list[Path]:
    found = [PROJECT / "README.md", PROJECT / "CHANGELOG.md"]
    found += [*(PROJECT / "docs").rglob("*.md"), *(PROJECT / "notes").glob("*.md")]
    found += (PROJECT / "examples").rglob("*.md")
    return sorted(path for path in found if path.is_file())


def example_configs() -> list[Path]:
    folders = (PROJECT / "examples", PROJECT / "benchmarks")
    found = (path for folder in folders for path in folder.rglob("*.yaml"))
    others = PROJECT / "examples" / "cluster"  # of containers
    return sorted(path for path in found if path.parent != others)


def unknown(text: str, *, keys: bool) -> Iterator[str]:
    """The flags, and with `keys` also the dotted keys, of a text that no job has."""
    named = FLAG.findall(text) + (KEY.findall(text) if keys else [])
    for name in named:
        plain = name.rstrip(".")
        is_known = plain in PLACEHOLDERS | OF_OTHERS or FILES.search(plain)
        if not is_known and find_key(KEYS, tuple(plain.split("."))) is None:
            yield plain


def strings_of(source: str) -> Iterator[str]:
    """The text of every string literal, docstrings and the fixed parts of f-strings included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (
            "Set `run.steps`, data.systm or --actor.zero.stagee=3; see run.yaml, data.load(x).",
            ["actor.zero.stagee", "data.systm"],
        ),
        ("pip install --no-deps x; plimsoll.run.state; --a.b.c", []),
        ("--rewards.answer.name x --rewards.a.options.k 3", []),
    ],
)
def test_the_search_finds_unknown_keys(text: str, keys: list[str]) -> None:
    assert list(unknown(text, keys=True)) == keys


def test_documents_name_only_flags_that_exist() -> None:
    wrong = {path.name: list(unknown(path.read_text(), keys=True)) for path in documents()}
    assert {name: found for name, found in wrong.items() if found} == {}


@pytest.mark.parametrize("folder", ["src", "examples", "benchmarks"])
def test_the_source_names_only_flags_and_keys_that_exist(folder: str) -> None:
    wrong = {
        f"{path.relative_to(PROJECT)}": found
        for path in sorted((PROJECT / folder).rglob("*.py"))
        for found in [[w for s in strings_of(path.read_text()) for w in unknown(s, keys=True)]]
        if found
    }
    assert wrong == {}


def test_yaml_in_documents_loads(tmp_path: Path) -> None:
    for path in documents():
        for text, job in YAML_BLOCK.findall(path.read_text()):
            file = tmp_path / f"{path.stem}.yaml"
            file.write_text(text)
            load_spec(JOBS[job], str(file))


def test_example_configs_say_their_job_and_load() -> None:
    for path in example_configs():
        first = path.read_text().splitlines()[0]
        job = re.match(rf"# ({NAMES})\b", first)
        assert job, f"{path}: its first line must be `# JOB ...`, with one of {NAMES}"
        load_spec(JOBS[job[1]], str(path))


def docstrings(tree: ast.AST) -> set[int]:
    """The lines that begin a text which stands alone: a docstring, or what a field means."""
    alone = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return {node.lineno for node in alone if isinstance(node.value, ast.Constant)}


def test_no_message_names_a_page_that_an_installed_package_lacks() -> None:
    """Docstrings may: they are for who has the source."""
    found = []
    for path in sorted((PROJECT / "src").rglob("*.py")):
        if "docs/" in (text := path.read_text()):
            tree = ast.parse(text)
            of_readers = docstrings(tree)
            texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            told = [node for node in texts if node.lineno not in of_readers]
            found += [x.value for x in told if re.search(r"\bdocs/[\w-]+\.md", str(x.value))]
    assert found == []
