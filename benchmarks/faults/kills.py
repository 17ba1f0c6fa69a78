"""Signals at random moments: kill -9, and those that a terminal, a batch system or a user sends, once or twice.

Requirements: the process ends at once, by the signal or with the one line that reports it; no record is false;
repeating the command gives the result of an undisturbed run. One process in eight is started as by a shell, the others
are forked.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.forks import Ended, forked, started
from benchmarks.faults.part import Part, draw
from benchmarks.faults.scenarios import SCENARIOS, Scenario, Stage, fresh
from benchmarks.faults.snapshot import difference, false_records, snapshot, unfinished

#: The signal, and how many of it.
_SENT = [("KILL", 1), ("TERM", 1), ("HUP", 1), ("INT", 1), ("QUIT", 1), ("TERM", 2), ("INT", 2), ("HUP", 2)]
_NAMES = ("closed form", "rounds", "extraction", "adaptation")


class Kills(Part):
    """Cases are `<number>|<scenario>|<signal>|<how many>|<forked or spawned>`."""

    name, quick, full = "kills", 10, 120

    def __init__(self, scratch: Path, seed: int = 0) -> None:
        super().__init__(scratch, seed)
        self._stage = Stage(scratch / "stage")
        self._scenarios = {scenario.name: scenario for scenario in SCENARIOS if scenario.name in _NAMES}
        self._seconds: dict[str, float] = {}

    def cases(self, most: int) -> Sequence[str]:
        names, found = list(self._scenarios), []
        for number in range(most or self.full):
            sent, times = _SENT[(number // len(names) + number) % len(_SENT)]
            how = "spawned" if draw(self.seed, "how", number).random() < 1 / 8 else "forked"
            found.append(f"{number}|{names[number % len(names)]}|{sent}|{times}|{how}")
        return found

    def tried(self, case: str) -> str:
        _, name, sent, times, how = case.split("|")
        scenario, rng = self._scenarios[name], draw(self.seed, case)
        expected = snapshot(self._stage.undisturbed(scenario))
        longest = self._longest(scenario, how)
        out = fresh(self.scratch / "killed")
        self._stage.prepare(scenario, out)
        moment = rng.uniform(0, longest)
        start = self._spawned if how == "spawned" else self._forked
        ended = start(scenario, out, moment, getattr(signal, f"SIG{sent}"), int(times), rng.uniform(0, 0.02))
        trouble = _ended_badly(ended, sent)
        if not trouble and (false := false_records(out)):
            trouble = f"a false record in {', '.join(false)}"
        if not trouble:
            again = forked(self._stage.work(scenario, out))
            found = snapshot(out)
            if how == "spawned":  # only processes that this one forks leave out the drawing
                found, expected = _without_pictures(found), _without_pictures(expected)
            trouble = again.trouble(codes=(0,)) or difference(found, expected)
            if not trouble and (left := unfinished(out)):
                trouble = f"left behind: {', '.join(left)}"
        return f"SIG{sent} after {moment:.2f} s: {trouble}" if trouble else ""

    def count(self, case: str) -> str:
        return f"SIG{case.split('|')[2]}"

    def _forked(self, scenario: Scenario, out: Path, moment: float, sent: int, times: int, pause: float) -> Ended:
        child = started(self._stage.work(scenario, out))
        _sent(child.process, moment, sent, times, pause)
        return child.ended()

    def _spawned(self, scenario: Scenario, out: Path, moment: float, sent: int, times: int, pause: float) -> Ended:
        command = [sys.executable, "-m", "fcl_bench", *self._stage.overrides(scenario, out)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        _sent(process.pid, moment, sent, times, pause)
        try:
            printed, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            return Ended(-signal.SIGALRM, *process.communicate())
        return Ended(process.returncode, printed, err)

    def _longest(self, scenario: Scenario, how: str) -> float:
        """Seconds of the undisturbed command, whose pictures are drawn and which imports everything if spawned."""
        key = f"{scenario.name} {how}"
        if key not in self._seconds:
            begin, out = time.perf_counter(), fresh(self.scratch / "timed")
            self._stage.prepare(scenario, out)
            (self._spawned if how == "spawned" else self._forked)(scenario, out, 0.0, 0, 0, 0.0)
            self._seconds[key] = time.perf_counter() - begin
        return self._seconds[key]


def _without_pictures(files: dict[str, object]) -> dict[str, object]:
    return {name: content for name, content in files.items() if not name.endswith(".png")}


def _sent(process: int, moment: float, number: int, times: int, pause: float) -> None:
    time.sleep(moment)
    for _ in range(times):
        try:
            os.kill(process, number)
        except ProcessLookupError:  # it was done before
            return
        time.sleep(pause)


def _ended_badly(ended: Ended, sent: str) -> str:
    number = getattr(signal, f"SIG{sent}")
    if ended.code in (0, -number):  # done before, or before it could hear of signals
        return "" if ended.code else ended.trouble(codes=(0,))
    if ended.code != 128 + number:
        return f"exit code {ended.code}: {ended.last()}"
    lines = [line for line in ended.err.splitlines() if re.match(r"fcl-bench: (terminated|hung up|interrupted)", line)]
    return ended.trouble(codes=(128 + number,)) or ("" if len(lines) == 1 else f"{len(lines)} lines say so")
