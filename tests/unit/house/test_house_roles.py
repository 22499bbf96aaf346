"""Below the jobs, no code knows a role by its name: it asks the role what it takes part in.

To add a role: a function in `jobs/roles.py` that returns it, the job that lists it in its `roles`,
and its section in the job's config. Fields of `Role` (`resolve/roles.py`) say what it takes part
in: the plan, the cluster, the checkpoints and the code that loads its model need no word of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src" / "plimsoll"

ABOVE = {"api", "cli", "commands", "jobs"}
SETTINGS = "config"  # its keys are names of roles
NAMES = {"actor", "critic", "teacher"}
ALSO_COLUMNS = {"reference", "reward"}
OF_ROWS = {"data", "environment", "interop", "page", "reward", "rl", "run"}
"""Packages in which the names in ALSO_COLUMNS are columns of data and metrics."""
BY_NAME = {"roles", "trained", "frozen", "models", "own_groups"}
"""What is asked by a role's name."""

MOST_FILES = 10
"""They name keys of the config in messages, and the groups that `cluster.critic_ranks` and
`cluster.reward_ranks` give ranks of their own."""


def names_of_roles(text: str, package: str) -> Iterator[str]:
    """Yield each string that is the name of a role, unless it is a column of rows."""
    tree = ast.parse(text)
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    asked = {
        id(node.slice)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr in BY_NAME
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in documented:
            continue
        is_column = package in OF_ROWS and id(node) not in asked
        if node.value in NAMES or (node.value in ALSO_COLUMNS and not is_column):
            yield str(node.value)


def files_with_names() -> dict[Path, list[str]]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        package = path.relative_to(SOURCE).parts[0]
        if package in ABOVE or package == SETTINGS:
            continue
        if names := list(names_of_roles(path.read_text(encoding="utf-8"), package)):
            found[path.relative_to(SOURCE)] = names
    return found


def test_few_files_below_the_jobs_name_a_role() -> None:
    found = files_with_names()
    listed = "\n".join(f"{path}: {', '.join(names)}" for path, names in found.items())
    assert len(found) <= MOST_FILES, listed


def test_names_by_hand() -> None:
    text = '"""actor"""\nROW["reference"], roles["critic"], spec.roles["reference"], "teachers"\n'
    assert [*names_of_roles(text, "rl")] == ["critic", "reference"]
    assert [*names_of_roles(text, "train")] == ["reference", "critic", "reference"]


if __name__ == "__main__":
    for path, names in files_with_names().items():
        print(path, *names)
