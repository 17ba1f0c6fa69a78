"""Damaged files of every kind that the program reads: features, images, tables, weights, records, checkpoints, caches.

Requirements: the command ends in one line with exit code 2 or succeeds, within limits of time and memory. If the file
was the user's and the command succeeds, the record names other data than before, or the result is the same. If it was
the program's own, the result is the same: damage is detected, and the work is done again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults import mutations
from benchmarks.faults.forks import Ended, forked
from benchmarks.faults.mutations import Mutation
from benchmarks.faults.part import Part, draw, evenly
from benchmarks.faults.scenarios import FEATURES, IMAGES, SCENARIOS, Scenario, Stage, fresh
from benchmarks.faults.shim import STOPS, Shim
from benchmarks.faults.snapshot import difference, false_records, snapshot
from fcl_bench.files import read_json

#: Beyond what the process has; the bomb in `mutations` is larger.
_ROOM = 3 << 30
_NAMED = {scenario.name: scenario for scenario in SCENARIOS}
#: How a damaged file is judged: the program's own, the user's, and one that only tables read.
OWN, USERS, TABLES = "own", "users", "tables"
#: See `Target.before`.
NOT_BEGUN, KILLED, DONE, CACHED = "not begun", "killed", "done", "cached"


@dataclass(frozen=True)
class Target:
    """A file to damage.

    Attributes:
        scenario: the command that reads it.
        file: a pattern below the folder of what is there before the command.
        whose: see above.
        kinds: mutations of its format.
        before: the command's progress before the damage: not begun, killed once the file exists, done, or done with its
            runs deleted, so that only the cache is left.
        each: cases beside another target's 1.
    """

    scenario: Scenario
    file: str
    whose: str
    kinds: dict[str, Mutation]
    before: str = DONE
    each: float = 1.0


_M = mutations
_READER = Scenario("features", (*FEATURES, "method=afl"))
_PICTURES = Scenario("images", (*IMAGES, "method=fedncm"))
TARGETS: dict[str, Target] = {
    "features": Target(_READER, "inputs/features.npz", USERS, {**_M.NPZ, "with a bomb": _M.with_a_bomb}, NOT_BEGUN, 4),
    "image": Target(_PICTURES, "inputs/images/train/class1/0.png", USERS, _M.PNG, NOT_BEGUN, 2),
    "record": Target(_READER, "out/runs/*/run.json", OWN, {**_M.JSON, **_M.SEALED}, each=2),
    "model": Target(_READER, "out/runs/*/model.safetensors", OWN, _M.SAFETENSORS),
    "partition": Target(_READER, "out/runs/*/partition.npz", OWN, {}, each=0.5),
    "run's config": Target(_READER, "out/runs/*/config.yaml", OWN, _M.YAML, each=0.5),
    "run's table": Target(_READER, "out/runs/*/uploads.csv", OWN, _M.CSV, each=0.5),
    "checkpoint": Target(_NAMED["rounds"], "out/runs/*/checkpoint/state.json", OWN, _M.JSON, KILLED),
    "checkpoint's tensors": Target(
        _NAMED["rounds"], "out/runs/*/checkpoint/tensors-*.safetensors", OWN, _M.SAFETENSORS, KILLED
    ),
    "checkpoint's rows": Target(_NAMED["rounds"], "out/runs/*/checkpoint/rows-uploads-*.bin", OWN, {}, KILLED),
    "cached features": Target(_NAMED["extraction"], "cache/*.safetensors", OWN, _M.SAFETENSORS, CACHED),
    "chunk of an extraction": Target(
        _NAMED["extraction"], "cache/*.partial/*.safetensors", OWN, _M.SAFETENSORS, KILLED
    ),
    "adapted network": Target(
        _NAMED["adaptation"], "cache/adapted-*/tensors-*.safetensors", OWN, _M.SAFETENSORS, CACHED
    ),
    "state of an adaptation": Target(_NAMED["adaptation"], "cache/adapted-*/state.json", OWN, _M.JSON, CACHED),
    "record for tables": Target(_NAMED["tables"], "out/runs/*/run.json", TABLES, {**_M.JSON, **_M.SEALED}, NOT_BEGUN),
    "config for tables": Target(_NAMED["tables"], "out/runs/*/config.yaml", TABLES, _M.YAML, NOT_BEGUN, 0.5),
}


class Damage(Part):
    """Cases are `<target>|<mutation>|<number>`."""

    name, quick, full = "files", 34, 600

    def __init__(self, scratch: Path, seed: int = 0, targets: dict[str, Target] = TARGETS) -> None:
        super().__init__(scratch, seed)
        self._stage = Stage(scratch / "stage")
        self._targets = targets
        self._before: dict[str, Path] = {}
        self._outcome = ""

    def cases(self, most: int) -> Sequence[str]:
        whole = sum(target.each for target in self._targets.values())
        chosen = []
        for name, target in self._targets.items():
            kinds = list({**mutations.BYTES, **target.kinds})
            count = max(1, round((most or 2000) * target.each / whole))
            # Every mutation of the format is drawn at least as often as any mutation of the bytes.
            chosen += [f"{name}|{kinds[-1 - number % len(kinds)]}|{number}" for number in range(count)]
        return chosen if not most else evenly(chosen, most)

    def tried(self, case: str) -> str:
        name, kind, _ = case.split("|")
        target = self._targets[name]
        prepared, out = self._prepared(name), fresh(self.scratch / "damaged")
        shutil.copytree(prepared, out)
        file = _read(out, target.file)
        assert file is not None
        content = file.read_bytes()
        damaged = {**mutations.BYTES, **target.kinds}[kind](content, draw(self.seed, case))
        self._outcome = "as it was"
        if damaged == content:
            return ""
        file.write_bytes(damaged)
        before = sorted(str(path) for path in out.rglob("*"))
        ended = forked(self._work(target, out), room=_ROOM)
        self._outcome = "refused" if ended.code == 2 else "done"
        if trouble := ended.trouble():
            return trouble
        if false := false_records(out) if target.whose != TABLES else []:
            return f"a false record in {', '.join(false)}"
        if kind in mutations.SEALED:
            return ""  # who forges a record with its checksum may write what they like; it need only be read safely
        return {OWN: self._own, USERS: self._users, TABLES: lambda *_: ""}[target.whose](target, out, ended, before)

    def count(self, case: str) -> str:
        return self._outcome

    def _own(self, target: Target, out: Path, ended: Ended, _: list[str]) -> str:
        if ended.code == 2:
            # A record of another run, or of another version, is left to the user.
            return "" if "run folder" in ended.err and "(force=true" in ended.err else f"refused: {ended.last()}"
        return difference(snapshot(out), snapshot(self._stage.undisturbed(target.scenario)))

    def _users(self, target: Target, out: Path, ended: Ended, before: list[str]) -> str:
        expected = snapshot(self._stage.undisturbed(target.scenario))
        [honest] = [value for name, value in expected.items() if name.endswith("/run.json")]
        found = [read_json(path) for path in out.glob("out/runs/*/run.json")]
        if ended.code == 2:
            return "a refused run left a record" if found else ""
        other = found[0]["data_fingerprint"] != honest["data_fingerprint"]  # type: ignore[index]
        same = found[0]["metrics"] == honest["metrics"]  # type: ignore[index]
        return "" if other or same else "another result under the same fingerprint of the data"

    def _prepared(self, name: str) -> Path:
        """A folder as the command finds it; made once, to be copied."""
        if name in self._before:
            return self._before[name]
        target = self._targets[name]
        out = fresh(self.scratch / "damaged")  # where it is copied to later: some names depend on the folder's
        self._stage.undisturbed(target.scenario)
        self._stage.prepare(target.scenario, out)
        if target.whose == USERS:
            shutil.copytree(self._stage.inputs, out / "inputs")
        elif target.before in (DONE, CACHED):
            forked(self._work(target, out))
            if target.before == CACHED:
                shutil.rmtree(out / "out")
        elif target.before == KILLED:
            self._stop(target, out)
        if _read(out, target.file) is None:
            raise RuntimeError(f"{name}: {target.file} is not there to be damaged")
        self._before[name] = out.rename(self.scratch / f"before {name}")
        return self._before[name]

    def _stop(self, target: Target, out: Path) -> None:
        """Kill the command some writes after those that it needs until the file exists."""
        points = 10
        while points < 5000:
            fresh(out)
            self._stage.prepare(target.scenario, out)

            def stopped(at: int = points) -> int:
                Shim(out, at, STOPS).install()
                return self._work(target, out)()

            forked(stopped)
            if _read(out, target.file) is not None:
                return
            points += 5

    def _work(self, target: Target, out: Path) -> Callable[[], int]:
        if target.whose != USERS:
            return self._stage.work(target.scenario, out)
        return self._stage.work(target.scenario, out, inputs=out / "inputs")


def _read(out: Path, pattern: str) -> Path | None:
    """The file of that pattern that the command will read; of a checkpoint's, the one that its state names."""
    files = sorted(out.glob(pattern))
    if files and files[0].name.startswith(("tensors-", "rows-")):
        state = files[0].parent / "state.json"
        named = state.read_text() if state.exists() else ""
        files = [file for file in files if f'"{file.name}"' in named]
    return files[0] if files else None
