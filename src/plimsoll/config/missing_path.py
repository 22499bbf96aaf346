"""What a path is that should be of data or of a model here, and is of neither."""

from __future__ import annotations

import difflib
from pathlib import Path


def missing_path(name: str, wanted: str) -> tuple[str, str] | None:
    """Why nothing can be read there, and what to write instead; None where it may well be a name on
    the hub: `organisation/name` without such a directory here, or a single name with nothing like
    it here. wanted: such as `a model directory`.
    """
    path = Path(name)
    if path.exists():
        what = "It is a file." if path.is_file() else "It is neither a file nor a directory."
        return what, f"give the path of {wanted}"
    if path.is_symlink():
        return f"It is a link to {path.readlink()}, which is not there.", "mend the link"
    close = _nearest(path)
    simple = len(path.parts) <= 2 and path.parts[:1] not in ((".",), ("..",))
    by_name = simple and not path.is_absolute() and not name.startswith((".", "~"))
    on_hub = by_name and (not close if len(path.parts) == 1 else not path.parent.is_dir())
    if on_hub and not path.suffix.startswith((".json", ".parquet", ".gz")):
        return None
    gone = next((p for p in reversed([path, *path.parents]) if not p.exists()), path)
    near = f"did you mean {close}?" if close else f"give the path of {wanted}, or a name on the hub"
    why = f"There is no such file or directory: `{gone.name}` is not in {gone.parent.absolute()}."
    return why, near


def _nearest(path: Path) -> str | None:
    """The sibling that is called most like `path`."""
    if not path.parent.is_dir():
        return None
    siblings = sorted(sibling.name for sibling in path.parent.iterdir())
    close = difflib.get_close_matches(path.name, siblings, n=1)
    return str(path.parent / close[0]) if close else None
