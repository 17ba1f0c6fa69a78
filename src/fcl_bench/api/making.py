"""Makes runs from Python, one or many, as if they had been typed."""

from __future__ import annotations

import itertools
import logging
import math
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pandas as pd
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase

from fcl_bench.api.recorded import FIRST, Run, arranged
from fcl_bench.cli.command import storage_error
from fcl_bench.cli.overrides import composed_as_typed, ordered, value_text
from fcl_bench.config import Settings, load_settings
from fcl_bench.data.shared import sharing
from fcl_bench.errors import UserError, first_line
from fcl_bench.results.collect import frame_of, run_row
from fcl_bench.results.measures import MEASURES
from fcl_bench.tracking import Tracker, load_tracking

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


def settings_of(texts: list[str]) -> tuple[Settings, Tracker]:
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


log = logging.getLogger(__name__)


def run(method: str | None = None, *, overrides: Overrides = (), **keys: Any) -> Run:
    """Carry out one run, or load it if it is already complete; an interrupted run is continued.

    It is the run of `fcl-bench method=METHOD key=value ...`: the same checks, the same id, the same folder.

    Args:
        method: a value of `method=`; None for the default.
        overrides: further overrides: texts (`["method.M=2048"]`), or keys and values (`{"method.M": 2048}`).
        keys: any key of the configuration: `data="digits"`, `beta=0.1`, `seed=0`, `profile="quick"`, `out="outputs"`;
            keys with dots through `overrides` or `**{"method.M": 2048}`.

    Raises:
        UserError: with the command's error line; nothing is left half-written.
    """
    return _run(typed(overrides, _with_method(method, keys)))


def sweep(*methods: str | Iterable[str], overrides: Overrides = (), **keys: Any) -> pd.DataFrame:
    """Carry out a run for every combination, one after the other in this process; complete runs are loaded.

    Args:
        methods: values of `method=`, one by one or in lists; the default if there is none.
        overrides: overrides of all runs; see `run`.
        keys: as in `run`; a list, a tuple, a range or an array is swept (a list as one value is a list in a list).

    Returns:
        One row per run, in the order of the combinations: the swept keys, the columns of `runs`, and `error`, which
        says why a run failed and is None for the others.

    Raises:
        UserError: every run failed; with what the first one said.
    """
    names = [name for given in methods for name in ([given] if isinstance(given, str) else given)]
    keys = _with_method(names or None, keys)
    axes = {key: list(value) if _swept(value) else [value] for key, value in keys.items()}
    rows = []
    with sharing():
        for values in itertools.product(*axes.values()):
            job = dict(zip(axes, values, strict=True))
            shown = {key: value for key, value in job.items() if _swept(keys[key])}
            rows.append({**shown, **_row(overrides, job)})
    if rows and all(row["error"] for row in rows):
        raise UserError(f"all {len(rows)} runs failed, the first: {rows[0]['error']}", "fcl_bench.run for one of them")
    frame = frame_of(rows)
    # Where no run was made, these columns are there as well, and empty.
    absent = [name for name in dict.fromkeys((*FIRST, *MEASURES, "run_id", "path")) if name not in frame]
    frame = frame.assign(**{name: math.nan if name in MEASURES else None for name in absent})
    return arranged(frame, first=[key for key in axes if _swept(keys[key])])


def _with_method(method: Any, keys: dict[str, Any]) -> dict[str, Any]:
    return keys if method is None else {"method": method, **keys}


def _swept(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | dict)


def _row(overrides: Overrides, job: dict[str, Any]) -> dict[str, Any]:
    """The row of one run of a sweep."""
    try:
        done = _run(typed(overrides, job))
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:  # a bug in one run must not end the others
        log.debug("%s", job, exc_info=True)
        return {"error": f"{type(error).__name__}: {first_line(error)}"}
    return {**run_row(done.path, done.record), "path": str(done.path), "error": None}


def _run(texts: list[str]) -> Run:
    settings, tracking = settings_of(texts)
    if settings.scalars.preview:
        raise UserError("preview=true prints and draws a split, and runs nothing", "fcl-bench preview=true in a shell")
    if settings.transport.launched:
        raise UserError(
            f"transport={settings.transport.name} from Python: every rank would be a server of its own",
            "torchrun -m fcl_bench in a shell, once per run",
        )
    # Imported only now, as in the command, since drawing and training import much.
    from fcl_bench.execution.run import run as carry_out

    try:
        return Run(carry_out(settings, tracking).folder)
    except Exception as error:
        if known := storage_error(error):
            raise known from error
        raise
