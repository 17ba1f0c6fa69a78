"""The one kind of error that the user can fix."""

import difflib
import os
import re
from collections.abc import Iterable
from typing import Any

#: The largest number of characters of a word, and of a whole message, that are printed.
_WORD, _MESSAGE = 240, 2000


class UserError(Exception):
    """Wrong input, reported in one line: what is wrong, with its key and value, and what would work.

    The command prints it as `fcl-bench: error: <what> (<remedy>)` and exits with 2. Long values in it are shortened,
    and what cannot be printed is escaped.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        remedy = _shortened(" ".join(self.remedy.split()))
        return printable(f"{_shortened(' '.join(self.what.split()))} ({remedy})")


def printable(text: str, kept: str = "\n\t") -> str:
    """`text` with escape sequences and other characters that a terminal would obey written out; `kept` stay."""
    if text.isprintable():
        return text
    escaped = (one if one.isprintable() or one in kept else one.encode("unicode_escape").decode() for one in text)
    return "".join(escaped)


def _shortened(text: str) -> str:
    """`text` with long words cut in their middle, and cut itself if there are too many."""
    words = re.sub(rf"\S{{{_WORD + 1},}}", lambda word: _cut(word[0], _WORD), text)
    return words if len(words) <= _MESSAGE else _cut(words, _MESSAGE)


def _cut(text: str, most: int) -> str:
    """The start and the end of `text` around a note of how many characters are left out: `most` characters in all."""
    end = most // 4
    left_out = f"[{len(text) - most + 30} more]"
    return f"{text[: most - end - 30]}{left_out}{text[-end:]}"


def choices(options: Iterable[str], wrong: str = "", most: int = 24) -> str:
    """The options as a remedy, the nearest to what was typed first; only their number if there are more than `most`."""
    ordered = sorted(options)
    same = [option for option in ordered if option.casefold() == wrong.casefold()]
    near = same or difflib.get_close_matches(wrong, ordered, n=3, cutoff=0.5)
    listed = f"choices: {', '.join(ordered or ['none'])}" if len(ordered) <= most else f"one of {len(ordered)} choices"
    return f"did you mean {' or '.join(near)}? {listed}" if near else listed


def require_choice(key: str, value: str, options: Iterable[str], others: Iterable[str] = ()) -> None:
    """Raise a `UserError` unless `value` is one of `options`; it names `others` that would do as well."""
    options = list(options)
    if value not in options:
        raise UserError(f"{key}={value} is not known", ", or ".join([choices(options, str(value)), *others]))


def installing(extra: str) -> str:
    """The remedy if packages of an extra are missing: a checkout, since fcl-bench is in no package index."""
    return f"in the checkout of fcl-bench: pip install '.[{extra}]'"


def machine_memory() -> int:
    """Bytes of the machine's memory; of a system that does not report it, more than any has."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return 2**62
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_memory(key: str, size: int, what: str) -> None:
    """Raise a `UserError` if `size` bytes are more than the machine has (on systems that report it)."""
    if size > (machine := machine_memory()):
        raise UserError(f"{key} needs {size / 2**30:.3g} GiB for {what}", f"this machine has {machine / 2**30:.3g}")


def first_line(error: BaseException) -> str:
    """The first line of a library's message, or the error's type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def kind_of(value: Any) -> str:
    """What a value is, in words: its type, and a tensor's or an array's shape."""
    if value is None:
        return "None"
    kind = type(value).__name__.removeprefix("nd")  # an ndarray is an array
    words = f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        words += f" {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return words
