"""The campaign against a program with holes: `python -m tests.faults.planted` prints what each part finds, as JSON.

A process of its own, since the campaign forks, and the tests' process may have threads.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", HF_HUB_OFFLINE="1")

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.faults.concurrency import Concurrency
from benchmarks.faults.configurations import VALUES, Configurations
from benchmarks.faults.damage import TARGETS, Damage
from benchmarks.faults.forks import quiet
from benchmarks.faults.kills import Kills
from benchmarks.faults.part import Part
from benchmarks.faults.scenarios import SCENARIOS, scratch_root
from benchmarks.faults.uploads import Uploads
from benchmarks.faults.writes import Writes


@contextmanager
def in_place(path: Path) -> Iterator[Path]:
    """A writer that does not rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    yield path


def unlocked(*_: object) -> Any:
    """A lock that is none."""
    return nullcontext()


class Raised(Exception):
    """A signal that ends a command as a bug does."""

    def __init__(self, number: int) -> None:
        super().__init__(number)


class Fits(str):
    """A checksum that is any file's."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def nothing(*_: object, **__: object) -> None:
    """A check that finds nothing."""


def writes(scratch: Path) -> tuple[Part, list[str]]:
    part = Writes(scratch, scenarios=SCENARIOS[:1])
    points = [number for number, point in enumerate(part.points("closed form")) if point.startswith("write /out/runs")]
    return part, [f"closed form:{number}:{kind}" for number in points[5::6] for kind in ("stops", "fails")]


def files(scratch: Path) -> tuple[Part, list[str]]:
    name = "checkpoint's tensors"
    cases = [f"{name}|with other numbers|{number}" for number in range(6)]
    return Damage(scratch, targets={name: TARGETS[name]}), cases


def configurations(scratch: Path) -> tuple[Part, list[str]]:
    long = next(number for number, value in enumerate(VALUES) if len(value) > 1000)
    return Configurations(scratch), [f"|{key}|{long}" for key in ("wire.dtype", "device", "beta")]


def kills(scratch: Path) -> tuple[Part, list[str]]:
    return Kills(scratch), [f"{number}|rounds|TERM|1|forked" for number in range(4)]


def concurrency(scratch: Path) -> tuple[Part, list[str]]:
    return Concurrency(scratch), [f"{number}|the same training three times" for number in range(2)]


def uploads(scratch: Path) -> tuple[Part, list[str]]:
    part = Uploads(scratch)
    kinds = ("not a number", "negative", "an eigenvalue below 0")
    return part, [f"stsa|float32|statistics|G|{kind}|{mode}" for kind in kinds for mode in ("fail", "drop")]


#: What is planted: what stands in for what, the part that is to find it, and its cases.
PLANTED: dict[str, tuple[Callable[[Path], tuple[Part, list[str]]], dict[str, Any]]] = {
    "a writer that does not rename": (
        writes,
        {"fcl_bench.execution.folder.replacing": in_place, "fcl_bench.engine.checkpoint.replacing": in_place},
    ),
    "a full disk that is taken for a bug": (writes, {"fcl_bench.cli.app.storage_error": lambda *_: None}),
    "a reader that ignores a checksum": (files, {"fcl_bench.engine.checkpoint.file_checksum": lambda *_: Fits()}),
    "messages as long as what was typed": (configurations, {"fcl_bench.errors._shortened": str}),
    "a signal that ends as a bug": (kills, {"fcl_bench.cli.command._Ended": Raised}),
    "a run without its lock": (concurrency, {"fcl_bench.execution.run.locked": unlocked}),
    "a server that checks nothing": (uploads, {"fcl_bench.engine.validation.first_objection": nothing}),
}


def found(name: str) -> dict[str, int]:
    """How many cases there are, how many fail as it is, and how many with what is planted."""
    make, patches = PLANTED[name]
    with tempfile.TemporaryDirectory(prefix="fcl-planted-", dir=scratch_root()) as scratch:
        part, cases = make(Path(scratch))
        honest = [case for case in cases if part.tried(case)]
        with ExitStack() as stack:
            for target, value in patches.items():
                stack.enter_context(patch(target, value))
            planted = [case for case in cases if part.tried(case)]
    return {"cases": len(cases), "honest": len(honest), "planted": len(planted)}


if __name__ == "__main__":
    with quiet():
        results = {name: found(name) for name in sys.argv[1:] or PLANTED}
    print(json.dumps(results))
