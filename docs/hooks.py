"""What the site has beside docs/: the README as its first page, the examples' pages with their
files, the changelog, and a reference of what users extend, from docstrings (mkdocs.yml).

Links are written for the repository; a page that is elsewhere in the site than in the repository
has its links rewritten, and links to source files become plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PROJECT = Path(__file__).parents[1]
REFERENCE = {
    "records": "What the packages exchange",
    "environment.protocol": "Environments",
    "reward": "Rewards",
    "algorithm.advantage": "Advantages",
    "algorithm.policy_loss": "Policy losses",
    "algorithm.preference_loss": "Preference losses",
    "resolve.job": "Jobs",
    "resolve.run_spec": "A resolved run",
    "memory.plan": "The plan",
    "errors": "Errors and exit codes",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?!\w+:|#)[^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> None:
    """Add the reference to the navigation."""
    pages = [{title: f"reference/{module}.md"} for module, title in REFERENCE.items()]
    config.nav[-1]["Reference"] += pages


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add what lies outside docs/."""
    for module, title in REFERENCE.items():
        text = f"# {title}\n\n::: plimsoll.{module}\n"
        files.append(File.generated(config, f"reference/{module}.md", content=text))
    outside = [PROJECT / "CHANGELOG.md", *PROJECT.glob("examples/*/README.md")]
    outside += [*PROJECT.glob("examples/*/*.png"), *PROJECT.glob("examples/*/*.svg")]
    for path in outside:
        name = path.relative_to(PROJECT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, "index.md", abs_src_path=str(PROJECT / "README.md")))


def on_page_markdown(text: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at where the site has what they name."""
    own = page.file.src_uri
    at = "README.md" if own == "index.md" else own
    if (PROJECT / "docs" / own).exists():
        at = f"docs/{own}"

    def rewritten(link: re.Match[str]) -> str:
        picture, words, name, anchor = link[1], link[2], link[3], link[4] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(at), name))
        target = "index.md" if target == "README.md" else target.removeprefix("docs/")
        if files.get_file_from_path(target) is None:
            return words
        return f"{picture}[{words}]({posixpath.relpath(target, posixpath.dirname(own))}{anchor})"

    return LINK.sub(rewritten, text)
