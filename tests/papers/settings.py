"""The `setting` column of the papers' numbers, taken apart."""

from __future__ import annotations

import re


def overrides(setting: str) -> dict[str, str]:
    """key -> value of every override; "words in quotes" are left out.

    Raises:
        ValueError: something that is neither.
    """
    found = {}
    for token in re.findall(r'"[^"]*"|\S+', setting):
        if not token.startswith('"'):
            key, equals, value = token.partition("=")
            if not (re.fullmatch(r"[A-Za-z_.]+", key) and equals and value) or key in found:
                raise ValueError(f"{token!r} in {setting!r} is no override")
            found[key] = value
    return found
