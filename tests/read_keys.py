"""Which keys of a run are read by what does its work: attributes of the settings' dataclasses, recorded when read.

Reads that only convert, compare, copy or refuse a configuration do not count.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fcl_bench.config import GROUPS, Settings

#: Modules whose code only converts, copies and compares.
_MODULES = ("fcl_bench.config", "fcl_bench.typed", "dataclasses", "copy", "pickle", "omegaconf")
#: Functions that only refuse what cannot work, or tell runs apart.
_CHECKS = ("__post_init__", "check", "identity", "record_entry", "__repr__", "__eq__", "described", "_check_noise")

Key = tuple[type, str]


def parts_of(settings: Settings) -> dict[str, Any]:
    """Each dataclass of a run's groups, nested ones included, by its key ("method.training")."""
    found: dict[str, Any] = {}

    def enter(key: str, part: Any) -> None:
        found[key] = part
        for field in dataclasses.fields(part):
            value = vars(part).get(field.name)
            if dataclasses.is_dataclass(value):
                enter(f"{key}.{field.name}", value)

    for group in GROUPS:
        enter(group, getattr(settings, group))
    return found


def keys_of(settings: Settings) -> dict[str, Key]:
    """Each key of the run's groups, and how its reads are recorded."""
    return {
        f"{key}.{field.name}": (type(part), field.name)
        for key, part in parts_of(settings).items()
        for field in dataclasses.fields(part)
        if not dataclasses.is_dataclass(vars(part).get(field.name))
    }


@contextmanager
def recorded(settings: Settings) -> Iterator[set[Key]]:
    """In this block whatever is read of the settings, or of copies of them, is entered into the set."""
    seen: set[Key] = set()
    classes = {type(part) for part in parts_of(settings).values()}
    names = {kind: {field.name for field in dataclasses.fields(kind)} for kind in classes}
    before = {kind: vars(kind).get("__getattribute__") for kind in classes}
    for kind in classes:
        _watch(kind, names, seen)
    try:
        yield seen
    finally:
        for kind, own in before.items():
            if own is None:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = own


def _watch(kind: Any, names: dict[type, set[str]], seen: set[Key]) -> None:
    inherited = kind.__getattribute__

    def read(self: Any, name: str) -> Any:
        own = type(self)
        if name in names.get(own, ()) and (own, name) not in seen and _works(sys._getframe(1)):
            seen.add((own, name))
        return inherited(self, name)

    kind.__getattribute__ = read


def _works(frame: FrameType | None) -> bool:
    """Whether the code that reads does a run's work."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if frame.f_code.co_name in _CHECKS or module.startswith(_MODULES):
            return False
        if module.startswith("tests."):
            return True
        frame = frame.f_back
    return True
