"""Concurrent commands: the same run twice, runs that share a cache, sweeps, tables of unfinished runs.

Requirements: every command ends without an error; no record is false; the final files are those of the commands run one
after the other, with each run done once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.forks import started
from benchmarks.faults.part import Part, draw
from benchmarks.faults.scenarios import SCENARIOS, Scenario, Stage, fresh
from benchmarks.faults.snapshot import difference, false_records, snapshot, unfinished

_NAMED = {scenario.name: scenario for scenario in SCENARIOS}
_EXTRACTION = _NAMED["extraction"]
_OTHER = Scenario("another of the same features", (*_EXTRACTION.overrides[:-3], "method=afl"))
_ADAPTATION = _NAMED["adaptation"]
_BESIDE = Scenario("another of the same network", (*_ADAPTATION.overrides, "method=fedlda", "method.M=16"))
#: What runs side by side, and which of them is killed on the way, if any.
_GROUPS: dict[str, tuple[list[Scenario], bool]] = {
    "the same run twice": ([_NAMED["closed form"]] * 2, False),
    "the same training three times": ([_NAMED["rounds"]] * 3, False),
    "one extraction for two runs": ([_EXTRACTION, _OTHER], False),
    "one adaptation for two runs": ([_ADAPTATION, _BESIDE], False),
    "the same sweep twice": ([_NAMED["sweep"]] * 2, False),
    "the same preview twice": ([_NAMED["preview"]] * 2, False),
    "the same tables three times": ([_NAMED["tables"]] * 3, False),
    "tables beside the run that they are of": ([_NAMED["tables"], _NAMED["rounds"]], False),
    "the same run twice, one is killed": ([_NAMED["rounds"]] * 2, True),
    "one extraction for two runs, one is killed": ([_OTHER, _EXTRACTION], True),
}


class Concurrency(Part):
    """Cases are `<number>|<what runs side by side>`."""

    name, quick, full = "concurrency", 4, 40

    def __init__(self, scratch: Path, seed: int = 0) -> None:
        super().__init__(scratch, seed)
        self._stage = Stage(scratch / "stage")
        self._expected: dict[str, dict[str, object]] = {}

    def cases(self, most: int) -> Sequence[str]:
        names = list(_GROUPS)
        return [f"{number}|{names[number % len(names)]}" for number in range(most or self.full)]

    def tried(self, case: str) -> str:
        name = case.split("|")[1]
        scenarios, kills = _GROUPS[name]
        expected = self._one_after_the_other(name)
        out = self._prepared(scenarios)
        rng, children = draw(self.seed, case), []
        for scenario in scenarios:
            children.append(started(self._stage.work(scenario, out)))
            time.sleep(rng.uniform(0, 0.1))
        if kills:
            time.sleep(rng.uniform(0, 0.2))
            children[-1].kill()
        ended = [child.ended() for child in children]
        for one in ended[:-1] if kills else ended:
            if trouble := one.trouble(codes=(0,)):
                return trouble
        if false := false_records(out):
            return f"a false record in {', '.join(false)}"
        if kills and (trouble := self._again(scenarios[-1:], out)):
            return f"the killed command again: {trouble}"
        # Tables may be written before or after the run exists.
        if "tables" in name and (trouble := self._again(scenarios[:1], out)):
            return f"the tables again: {trouble}"
        if trouble := difference(snapshot(out), expected):
            return trouble
        if left := unfinished(out):
            return f"left behind: {', '.join(left)}"
        logs = [log.read_text() for log in out.rglob("runs/*/run.log")]
        twice = [log for log in logs if log.count("run is complete") > 1]
        return "a run was done twice" if twice else ""

    def _again(self, scenarios: Sequence[Scenario], out: Path) -> str:
        for scenario in scenarios:
            if trouble := started(self._stage.work(scenario, out)).ended().trouble(codes=(0,)):
                return trouble
        return ""

    def _one_after_the_other(self, name: str) -> dict[str, object]:
        if name not in self._expected:
            scenarios = _GROUPS[name][0]
            for scenario in scenarios:
                self._stage.undisturbed(scenario)  # so that everything is imported
            out = self._prepared(scenarios)
            if trouble := self._again([*scenarios, *(one for one in scenarios if one.kind == "tables")], out):
                raise RuntimeError(f"{name} does not work even one after the other: {trouble}")
            self._expected[name] = snapshot(out)
        return self._expected[name]

    def _prepared(self, scenarios: Sequence[Scenario]) -> Path:
        out = fresh(self.scratch / "beside")
        self._stage.prepare(next((one for one in scenarios if one.kind == "tables"), scenarios[0]), out)
        return out
