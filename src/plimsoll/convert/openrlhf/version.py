"""The releases of OpenRLHF that are read."""

from __future__ import annotations

from functools import cache

from plimsoll.errors import ConfigError

Version = tuple[int, int, int]

_RELEASES = {
    "0.6": range(5),
    "0.7": range(6),
    "0.8": range(12),
    "0.9": range(11),
    "0.10": range(5),
    "0.11": range(3),
}
RELEASES: tuple[Version, ...] = tuple(
    (int(minor.split(".")[0]), int(minor.split(".")[1]), patch)
    for minor, patches in _RELEASES.items()
    for patch in patches
)
FIRST, LAST = RELEASES[0], RELEASES[-1]


@cache
def parse_version(text: str) -> Version:
    """Of `0.8.2`. The name must be right."""
    major, minor, patch = (int(part) for part in text.split("."))
    return major, minor, patch


def written(version: Version) -> str:
    return ".".join(map(str, version))


def given_version(text: str) -> Version:
    """What `--version` says; the last one of `0.8`. A post-release is its release.

    Raises ConfigError for one that is not read.
    """
    plain = text.lower().removeprefix("v").partition(".post")[0]
    found = [one for one in RELEASES if plain in (written(one), written(one).rpartition(".")[0])]
    if not found:
        raise ConfigError(
            f"--version {text!r} is no release of OpenRLHF that is read: {written(FIRST)} to "
            f"{written(LAST)}. Leave it out to have the version told from the flags."
        )
    return found[-1]
