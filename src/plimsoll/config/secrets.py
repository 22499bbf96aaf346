"""What is secret: the one list, by name and by value.

Whatever is printed goes through `mask_secrets`, and so do the pages of plans. A config is written
with its secrets masked (`Secret` in base.py). Texts of responses may be long and hostile: each
pattern here takes linear time.
"""

from __future__ import annotations

import functools
import os
import re
from urllib.parse import urlsplit

MASK = "***"

_NO_WORDS = (
    r"api[_-]?keys?|(?:access|auth|private)[_-]?keys?|secrets?[_-]?(?:access[_-]?)?keys?"
    r"|passw(?:or)?d|webhook[_-]?url|authorization|wandb[._]key|use_wandb"
    r"|(?:access|api|auth|bearer|hf|hub|login|refresh|session)[_-]?token"
)
_NAMES = rf"{_NO_WORDS}|secrets?(?:[_-]?access)?|passphrase|credentials?|webhook"
"""Ends of names whose values are secret. Names such as `eos_token` and `prompt_key` are not.

Those that are words of English, too, may stand before a colon in a sentence.
"""
_VARIABLES = r"(?:KEY|KEY_ID|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS|WEBHOOK|WEBHOOK_URL)"
"""The same of environment variables, which are written in capitals."""
_SECRET_NAME = re.compile(
    rf"(?i:(?:^|.*[._-])(?:{_NAMES}|(?<![._-])token)$)|(?:^|.*[._-])(?:[A-Z0-9]+_)*{_VARIABLES}$",
    re.DOTALL,
)

_VARIABLE = r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b"
"""The name of a variable, which settings such as `api_key` have."""
_SCHEME = r"(?i:bearer|basic)[ ]+"
_VALUE = r"""[^\s"'&,;{}\[\]]+"""
_URL = re.compile(r"""https?://[^\s"'<>\]\\]*[^\s"'<>\]\\,;.)}]""", re.IGNORECASE)
_BY_NAME = re.compile(
    rf"""(?P<before>(?i:{_NAMES})["']?[ ]?=[ ]?"""
    rf"""|(?i:{_NO_WORDS})["']?[ ]?:[ ]?(?!["']?{_VARIABLE})"""
    rf"""|(?<=[A-Z0-9]_){_VARIABLES}["']?[ ]?[=:][ ]?)"""
    rf"""(?P<quote>["']?)(?:{_SCHEME})?{_VALUE}"""
)
_HEADER = re.compile(rf"\b(?P<scheme>{_SCHEME})[\w.~+/=-]{{12,}}")
_BY_FLAG = re.compile(rf"""(?<![\w.-])(?P<flag>--[\w.-]+)[ ]["']?(?![A-Z0-9_]+\b){_VALUE}""")
"""A flag with a word after it, unless this is in capitals: then it names a variable."""
_WEBHOOK = re.compile(
    r"""(?P<before>\bnotify["']?(?:=|:?\s{1,3})["'\[]?)(?P<named>[a-z]+://[^\s"'<>\]]+)"""
    r"|https?://(?:hooks\.slack\.com|(?:ptb\.|canary\.)?discord(?:app)?\.com/api/webhooks"
    r"|[\w-]+\.webhook\.office\.com|api\.telegram\.org/bot|hooks\.zapier\.com)[^\s\"'<>]*"
)
_TOKEN = re.compile(
    r"\b(?:hf_|sk-|gh[oprsu]_|github_pat_|glpat-|xox[abeprs]-|AKIA|wandb_v1_)[A-Za-z0-9_-]{16,}"
)
_PASSWORD = re.compile(r"""(?<=://)[^\s/@"']+(?=@)""")
_SHORTEST = 12
"""Characters of a variable's value that is masked wherever it occurs; less may be any word."""


@functools.lru_cache(maxsize=1024)  # the names of the environment, at each text that is printed
def is_secret(name: str) -> bool:
    """Return whether values of this name are secret: of a setting, or an environment variable."""
    return _SECRET_NAME.match(name) is not None


def mask_url(value: str) -> str:
    """Return a URL with `***` for all that comes after its host; a name stays as it is."""
    if "://" not in value:
        return value
    url = urlsplit(value)
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}/{MASK}"


def mask_setting(value: str) -> str:
    """Return the value of a key that holds a URL or names a variable, without what is secret."""
    is_variable = re.fullmatch("[A-Z_][A-Z0-9_]*", value) or value in os.environ
    return mask_url(value) if "://" in value else value if is_variable else MASK


def mask_urls(text: str) -> str:
    """Return a text with all URLs of the web masked, for values whose meaning is not known."""
    return _URL.sub(lambda match: mask_url(match[0]), text)


def mask_secrets(text: str) -> str:
    """Return a text with `***` for each secret in it.

    Secrets are values after a secret name, tokens and webhooks of known forms, passwords in URLs,
    and the values of this process's environment variables with secret names.
    """
    for value in _values_of_variables():
        text = text.replace(value, MASK)
    text = _WEBHOOK.sub(lambda m: (m["before"] or "") + mask_url(m["named"] or m[0]), text)
    text = _BY_NAME.sub(rf"\g<before>\g<quote>{MASK}", text)
    text = _HEADER.sub(rf"\g<scheme>{MASK}", text)
    text = _BY_FLAG.sub(lambda m: f"{m['flag']} {MASK}" if is_secret(m["flag"]) else m[0], text)
    return _PASSWORD.sub(MASK, _TOKEN.sub(MASK, text))


def _values_of_variables() -> list[str]:
    """Return the secrets in the environment, the longest first; paths are none."""
    values = {
        value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST and value[0] not in "/~." and is_secret(name)
    }
    return sorted(values, key=len, reverse=True)
