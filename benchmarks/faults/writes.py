"""Make every write of a command fail in turn: by an error, a full disk, or the end of the process.

Requirements: the command ends in one line or succeeds; no record is false or incomplete; repeating the command
succeeds, and it leaves exactly the files of an undisturbed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.forks import KILLED, forked
from benchmarks.faults.part import Part, evenly
from benchmarks.faults.scenarios import SCENARIOS, Scenario, Stage, fresh
from benchmarks.faults.shim import FAILS, FULL, KINDS, STOPS, Shim
from benchmarks.faults.snapshot import difference, false_records, finished, snapshot, unfinished

#: What a full disk refuses; where it meets anything else, it is the same as at the next of these.
_NEEDS_ROOM = ("open", "write", "fsync", "os.mkdir", "safetensors")


class Writes(Part):
    """Cases are `<scenario>:<point>:<kind>`."""

    name, quick, full = "writes", 40, 1200

    def __init__(self, scratch: Path, seed: int = 0, scenarios: Sequence[Scenario] = SCENARIOS) -> None:
        super().__init__(scratch, seed)
        self._stage = Stage(scratch / "stage")
        self._scenarios = {scenario.name: scenario for scenario in scenarios}
        self._traces: dict[str, list[str]] = {}
        self._expected: dict[str, dict[str, object]] = {}

    def cases(self, most: int) -> list[str]:
        chosen = []
        for name, scenario in self._scenarios.items():
            found = [
                f"{name}:{number}:{kind}"
                for number, point in enumerate(self.points(name))
                for kind in KINDS
                if (kind != FULL or point.startswith(_NEEDS_ROOM)) and f" {scenario.below}" in point
            ]
            chosen += evenly(found, -(-most * scenario.share // 100))
        return chosen

    def tried(self, case: str) -> str:
        name, number, kind = case.rsplit(":", 2)
        scenario = self._scenarios[name]
        point = self.points(name)[int(number)]
        expected = self._undisturbed(name)
        out = fresh(self.scratch / "tried")
        self._stage.prepare(scenario, out)

        def disturbed() -> int:
            Shim(out, int(number), kind).install()
            return self._stage.work(scenario, out)()

        first = forked(disturbed)
        if kind == STOPS and first.code != KILLED:
            return f"at {point}: it came to its end with exit code {first.code}"
        trouble = "" if kind == STOPS else first.trouble(runs=2 if scenario.kind == "sweep" else 1)
        if not trouble and (false := false_records(out)):
            trouble = f"a false record in {', '.join(false)}"
        trouble = trouble or difference(finished(snapshot(out)), expected, whole=first.code == 0)
        if trouble:
            return f"at {point}: {trouble}"
        again = forked(self._stage.work(scenario, out))
        trouble = again.trouble(codes=(0,)) or difference(snapshot(out), expected)
        if not trouble and "damaged" in again.err + again.out:
            trouble = f"something is taken for damaged: {again.last()}"
        if not trouble and (left := unfinished(out)):
            trouble = f"left behind: {', '.join(left)}"
        return f"at {point}, the same command again: {trouble}" if trouble else ""

    def count(self, case: str) -> str:
        return {FAILS: "failed writes", FULL: "full disks", STOPS: "kills"}[case.rsplit(":", 1)[1]]

    def _undisturbed(self, name: str) -> dict[str, object]:
        if name not in self._expected:
            self._expected[name] = snapshot(self._stage.undisturbed(self._scenarios[name]))
        return self._expected[name]

    def points(self, name: str) -> list[str]:
        """The command's writes, one per point."""
        if name not in self._traces:
            self._undisturbed(name)
            out = fresh(self.scratch / "traced")
            self._stage.prepare(self._scenarios[name], out)
            file = self.scratch / "trace.txt"

            def traced() -> int:
                points: list[str] = []
                Shim(out, trace=points).install()
                code = self._stage.work(self._scenarios[name], out)()
                file.write_text("\n".join(points))
                return code

            ended = forked(traced)
            if trouble := ended.trouble(codes=(0,)) or difference(snapshot(out), self._undisturbed(name)):
                raise RuntimeError(f"{name} under a shim that does nothing: {trouble}\n{ended.err}")
            self._traces[name] = file.read_text().splitlines()
        return self._traces[name]
