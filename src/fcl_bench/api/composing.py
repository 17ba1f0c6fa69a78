"""Turns Python values into the settings of a run, as if they had been typed; Hydra's own state is left unchanged."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase

from fcl_bench.cli.overrides import composed_as_typed, ordered
from fcl_bench.config import Settings, load_settings
from fcl_bench.errors import UserError
from fcl_bench.tracking import Tracking, load_tracking

Overrides = Iterable[str] | Mapping[str, Any]

#: A lock, since Hydra keeps its state in one place for all threads.
_COMPOSING = threading.RLock()


def typed(overrides: Overrides, keys: Mapping[str, Any]) -> list[str]:
    """What one would type after `fcl-bench` for these keys and overrides; an override wins over a key.

    Raises:
        UserError: an option, a key of Hydra's, or a value that has no form on a command line.
    """
    if isinstance(overrides, str):
        raise UserError(f"overrides={overrides!r} is a text", f"a list: overrides=[{overrides!r}]")
    more = dict(overrides) if isinstance(overrides, Mapping) else {}
    given = [] if isinstance(overrides, Mapping) else list(overrides)
    texts = [f"{key}={value_text(key, value)}" for key, value in {**keys, **more}.items()]
    for text in (*texts, *given):
        if text.startswith("-"):
            raise UserError(f"{text} is an option of the command", "key=value; several runs: fcl_bench.sweep")
        if re.match(r"\+*hydra[./=]", text):
            raise UserError(f"{text} is for the command, which Hydra runs", "keys of the run alone")
    return ordered([*texts, *given])


def value_text(key: str, value: Any) -> str:
    """A Python value in the grammar of overrides: 0.1, true, null, [1,2], {a: 1}, 'a text with blanks'."""
    if value is None:
        return "null"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        # Text that needs no quotes in a shell gets none: `seed="0"` is a number there, too.
        plain = re.fullmatch(r"[\w./:+%@?|-]+", str(value), flags=re.ASCII)
        escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
        return str(value) if plain else f"'{escaped}'"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{value_text(key, entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list | tuple | range | np.ndarray):
        return "[" + ",".join(value_text(key, entry) for entry in value) + "]"
    raise UserError(f"{key}={value!r} is a {type(value).__name__}", "a number, a text, a truth value, None or a list")


def settings_of(texts: list[str]) -> tuple[Settings, Tracking]:
    """The settings that `fcl-bench TEXTS` would have. Raises a `UserError` with the command's message."""
    with _COMPOSING, _hydra_left_alone():
        config = composed_as_typed(texts)
        return load_settings(config), load_tracking(config)


@contextmanager
def _hydra_left_alone() -> Iterator[None]:
    """Restore Hydra's state after the block, for notebooks and for jobs of another Hydra application."""
    around, version = GlobalHydra.instance(), VersionBase.instance()
    hydra, base = around.hydra, version.getbase()
    around.hydra = None  # Hydra would not compose beside another application
    try:
        yield
    finally:
        GlobalHydra.set_instance(around)
        VersionBase.set_instance(version)
        around.hydra, version.version_base = hydra, base
