"""A result file of the suite: pytest-benchmark's JSON, read back as cases with their sides."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite.sides import LIMIT, OURS, PEER, Side


class Unusable(Exception):
    """A file that is no result of the suite: one line that says which and why."""


@dataclass(frozen=True)
class Timed:
    """One side as it was measured.

    Attributes:
        role, what, share, flops: see `sides.Side`.
        seconds: per round.
        processor: the same in seconds of all cores together.
    """

    role: str
    what: str
    share: float
    flops: float | None
    seconds: tuple[float, ...]
    processor: tuple[float, ...]

    @classmethod
    def of(cls, side: Side) -> Timed:
        """A side that has been timed in this process."""
        return cls(side.role, side.what, side.share, side.flops, tuple(side.seconds), tuple(side.processor))

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Case:
    """One case of one stage.

    Attributes:
        name: the same in every result file.
        stage: the benchmark.
        sizes: n, d, M, ... and dtype, as the case has them.
        sides: ours first.
        values: further numbers, such as an error or bytes.
    """

    name: str
    stage: str
    sizes: Mapping[str, Any]
    sides: tuple[Timed, ...]
    values: Mapping[str, float]

    @property
    def ours(self) -> Timed:
        return self.sides[0]

    def beside(self, role: str) -> list[Timed]:
        """The limits, or the peers."""
        return [side for side in self.sides if side.role == role]


@dataclass(frozen=True)
class Results:
    """A result file.

    Attributes:
        machine: pytest-benchmark's machine_info; ours is in its "fcl_bench".
        commit: what was measured.
        cases: by name, in the order of measurement.
    """

    machine: Mapping[str, Any]
    commit: str
    cases: Mapping[str, Case]


def ratio(over: Timed, under: Timed) -> float:
    """Seconds of one side over another's: in each round, and of those the median."""
    return statistics.median(a / b for a, b in zip(over.seconds, under.seconds, strict=True))


def rate_ratio(over: Timed, under: Timed) -> float | None:
    """Operations per second of one side over another's; None where operations are not told."""
    if over.flops is None or under.flops is None:
        return None
    return over.flops / under.flops / ratio(over, under)


def load(file: Path) -> Results:
    """Read a result file. Raises `Unusable`."""
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise Unusable(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Unusable(f"{file} is no JSON: {error}") from error
    return of_json(content, str(file))


def of_json(content: Any, source: str) -> Results:
    """The same from parsed JSON; `source` is what messages call it. Raises `Unusable`."""
    try:
        benchmarks = content["benchmarks"]
        machine = content["machine_info"]
        commit = str((content.get("commit_info") or {}).get("id") or "unknown")
    except (TypeError, KeyError, AttributeError) as error:
        raise Unusable(f"{source} is no result of pytest-benchmark: no machine_info or benchmarks") from error
    cases: dict[str, Case] = {}
    for entry in benchmarks:
        case = _case_of(entry, source)
        if case.name in cases:
            raise Unusable(f"{source} has the case {case.name!r} twice")
        cases[case.name] = case
    if not cases:
        raise Unusable(f"{source} has no case")
    return Results(machine, commit, cases)


def _case_of(entry: Any, source: str) -> Case:
    try:
        info = entry["extra_info"]
        sides = tuple(
            Timed(
                side["role"],
                side["what"],
                float(side["share"]),
                side["flops"],
                tuple(map(float, side["seconds"])),
                tuple(map(float, side["processor"])),
            )
            for side in info["sides"]
        )
        case = Case(info["name"], info["stage"], info["sizes"], sides, info["values"])
    except (TypeError, KeyError, ValueError) as error:
        named = entry.get("name") if isinstance(entry, Mapping) else None
        raise Unusable(f"{source}: benchmark {named!r} is none of the suite's: no {error}") from error
    roles = [side.role for side in sides]
    rounds = {len(side.seconds) for side in sides}
    if not roles or roles[0] != OURS or not set(roles[1:]) <= {LIMIT, PEER}:
        raise Unusable(f"{source}: {case.name!r} does not have ours first, then limits and peers, but {roles}")
    if len(rounds) != 1 or 0 in rounds or not all(second > 0 for side in sides for second in side.seconds):
        raise Unusable(f"{source}: {case.name!r} lacks seconds of some rounds")
    return case
