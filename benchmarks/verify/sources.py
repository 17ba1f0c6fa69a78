"""Where numbers come from: runs of fcl-bench, stored or made now; what a program prints; clocks; arithmetic."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

import fcl_bench
from benchmarks.verify.pages import NUMBER, REPOSITORY
from fcl_bench.config import YAML_LOADER, is_number, number_text, text
from fcl_bench.errors import UserError, choices
from fcl_bench.results.collect import frame_of, run_row
from fcl_bench.results.measures import MEASURES
from fcl_bench.results.reference import FROM, load
from fcl_bench.results.summarise import setting

STORED = yaml.load((Path(__file__).parent / "claims" / "stored.yaml").read_text(), Loader=YAML_LOADER)
#: Stored runs; runs of fcl-bench; a program's table; a test that asserts the number; a machine's seconds and memory;
#: runs of hours that are not stored; an equation.
KINDS = ("stored", "run", "output", "test", "timing", "costly", "arithmetic")
#: Kinds of which no value is read.
UNREAD = ("test", "timing", "costly")
#: Words of commands that stand for the reader's own files, and the variable that has the file.
_FILES = {
    "data.path": {"features": "FEATURES", "cifar100": "CIFAR100"},
    "backbone.checkpoint": {"mobilenetv2": "WEIGHTS", "vit_32": "VIT"},
}
#: What a stored row has beside keys of a command line.
_NO_KEYS = {"features", "data_fingerprint", "device", "protocol", "method.revision", FROM}
_GROUPS = ("data", "split", "partition", "adapt", "faults", "noise", "secure")


class TooDear(Exception):
    """A job would take more than is left; the message says what it needs."""


class Missing(Exception):
    """A job needs a file that was not named; the message says which."""


@dataclass
class Bench:
    """Carries jobs out, each once, and keeps what they gave.

    Attributes:
        files: by variable (FEATURES), the file that the caller has.
        seconds: the processor seconds that are left.
        each: the most that one number may take.
    """

    out: Path
    files: dict[str, str]
    seconds: float
    each: float = 120.0
    rows: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict)
    printed: dict[str, str] = field(default_factory=dict)

    def afford(self, cost: float) -> None:
        """Raise `TooDear` unless there is time for `cost` more processor seconds."""
        if cost > min(self.each, self.seconds):
            raise TooDear(f"needs about {cost:.0f} s")

    def with_files(self, words: list[str]) -> list[str]:
        """The words of a command with the reader's files in place of names in capitals.

        Raises:
            Missing: the caller has not named one.
        """
        keys = dict(word.split("=", 1) for word in words if "=" in word)
        for key, group in (("data.path", "data"), ("backbone.checkpoint", "backbone")):
            variable = _FILES[key].get(keys.get(group, ""))
            wanted = variable and (key == "data.path" or key in keys)
            if wanted and not self.files.get(variable):
                raise Missing(f"needs {variable}=")
            if wanted:
                keys[key] = self.files[variable]
        return [f"{key}={value}" for key, value in keys.items()]

    def run(self, words: list[str]) -> dict[str, Any]:
        """The row of one run of fcl-bench, which is made unless this process or its folder has it."""
        key = tuple(words)
        if key not in self.rows:
            begin = time.process_time()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                run = fcl_bench.run(overrides=[*self.with_files(words), f"out={self.out}"])
            self.rows[key] = dict(_numbers(run.record)) | run_row(run.path, run.record)
            self.seconds -= time.process_time() - begin
        return self.rows[key]

    def program(self, command: str) -> str:
        """What a program prints, run in the repository once."""
        if command not in self.printed:
            begin = os.times()
            words = [re.sub(r"\b(FEATURES|CIFAR100)\b.*", self._file, word) for word in shlex.split(command)]
            words = [sys.executable, *(words[1:] if words[0].endswith("python") else ["-m", *words])]
            done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
            if done.returncode:
                raise UserError(f"{command}: exit code {done.returncode}", done.stderr.strip()[-200:] or "no message")
            self.printed[command] = done.stdout
            self.seconds -= os.times().children_user - begin.children_user
        return self.printed[command]

    def _file(self, found: re.Match[str]) -> str:
        if not self.files.get(found[1]):
            raise Missing(f"needs {found[1]}=")
        return self.files[found[1]]


@dataclass(frozen=True)
class Source:
    """What the YAML says of a source, and the frame that it gives."""

    told: dict[str, Any]

    @property
    def kind(self) -> str:
        kinds = [kind for kind in KINDS if kind in self.told]
        if len(kinds) != 1:
            raise UserError(f"a source has {kinds or 'no kind'}", f"one of {', '.join(KINDS)}")
        return kinds[0]

    @property
    def commands(self) -> list[str]:
        """The commands, as pages have them."""
        if self.kind == "stored":
            return [STORED[self.told["stored"]]["command"]]
        told = self.told[self.kind]
        return told if isinstance(told, list) else [told]

    def fixed(self) -> pd.DataFrame:
        """The stored rows; of another kind, none."""
        return _stored(self.told["stored"]) if self.kind == "stored" else pd.DataFrame()

    def affordable(self, each: float) -> pd.DataFrame:
        """The stored rows whose run takes at most `each` seconds."""
        cost, rows = STORED[self.told["stored"]]["cost"], self.fixed()
        return rows[rows["method"].map(lambda name: _cost(cost, name) <= each)]

    def fresh(self, bench: Bench, where: dict[str, str]) -> pd.DataFrame:
        """What the commands give now, of the jobs that do not contradict `where`.

        Raises:
            TooDear, Missing: the jobs cannot be run here.
        """
        if self.kind == "output":
            (command,) = self.commands
            if command not in bench.printed:
                bench.afford(self.told["cost"])
            return markdown_table(bench.program(f"{command} {self.told.get('with', '')}"))
        jobs = list(self._jobs(where))
        for words, _ in jobs:
            bench.with_files(words)
        bench.afford(sum(cost for words, cost in jobs if tuple(words) not in bench.rows))
        return _worded(frame_of([bench.run(words) for words, _ in jobs]))

    def _jobs(self, where: dict[str, str]) -> Iterator[tuple[list[str], float]]:
        """Yield the words and the processor seconds of each run."""
        if self.kind == "stored":
            about = STORED[self.told["stored"]]
            keys = [key for key in _keys(self.told["stored"]) if key not in _NO_KEYS]
            for _, row in matching(self.fixed(), where).iterrows():
                yield stored_words(row, keys, about["words"]), _cost(about["cost"], row["method"])
            return
        for command in self.commands:
            for words in swept(command):
                job = dict(word.split("=", 1) for word in words)
                if all(number_text(job.get(key, value)) == value for key, value in where.items()):
                    yield words, _cost(self.told["cost"], job.get("method", "fedran"))


@cache
def _stored(name: str) -> pd.DataFrame:
    return _worded(load(name))


@cache
def _keys(name: str) -> list[str]:
    frame = _stored(name)
    return ["method", *setting(frame), *(column for column in frame if column.startswith("method."))]


def _worded(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with its settings as users type them."""
    return frame.assign(**{column: frame[column].map(text) for column in frame if column not in MEASURES})


def _cost(told: float | dict[str, float], method: str) -> float:
    return float(told if isinstance(told, (int, float)) else told.get(method, told["other"]))


def _numbers(record: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a run.json that stand in no list, by keys with dots."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{key}.")
        elif is_number(value):
            yield f"{prefix}{key}", value


def swept(command: str) -> Iterator[list[str]]:
    """Yield the words of each run of an fcl-bench command; values with commas are swept with -m."""
    program, *words = shlex.split(command)
    if program != "fcl-bench":
        raise UserError(f"{command} is not of fcl-bench", "output: or timing: takes other programs")
    pairs = [word.split("=", 1) for word in words if word != "-m"]
    values = [re.split(r",(?![^\[{]*[]}])", value) if "-m" in words else [value] for _, value in pairs]
    for chosen in itertools.product(*values):
        yield [f"{key}={value}" for (key, _), value in zip(pairs, chosen, strict=True)]


def stored_words(row: pd.Series, keys: list[str], instead: dict[str, str]) -> list[str]:
    """The command line of a stored run: all its settings, typed.

    Args:
        row: of `load`.
        keys: the columns that are keys of a command line.
        instead: words in place of columns that are no keys; null leaves one out.
    """
    found = {key: row[key].replace(" ", "") for key in keys if row[key]} | {"seed": str(row["seed"])} | instead
    words = (f"{key}={value}" for key, value in found.items() if value is not None)
    return sorted(words, key=lambda word: word.split("=")[0] not in _GROUPS)


def where_of(told: str) -> dict[str, str]:
    """`method=fedran method.rank=64` as a mapping of texts."""
    pairs = (word.split("=", 1) for word in shlex.split(told or ""))
    return {key: number_text(value) for key, value in pairs}


def matching(frame: pd.DataFrame, where: dict[str, str]) -> pd.DataFrame:
    """The rows that have all values. Raises a `UserError` if a column is not there, or no row is left."""
    for key, value in where.items():
        if key not in frame:
            raise UserError(f"no run has the key {key}", choices(map(str, frame.columns), key))
        left = frame[frame[key] == value]
        if left.empty:
            raise UserError(f"no run has {key}={value}", choices(set(frame[key]) - {""}, value))
        frame = left
    return frame


def markdown_table(printed: str) -> pd.DataFrame:
    """The rows of all Markdown tables in a text, as text, under their headers; backticks and stars left out."""
    frames, lines = [], [line for line in printed.splitlines() if line.startswith("|")]
    cells = [[cell.strip().strip("`*") for cell in line.strip().strip("|").split("|")] for line in lines]
    rules = [index for index, row in enumerate(cells) if all(re.fullmatch(":?-+:?", cell) for cell in row)]
    for rule, following in zip(rules, [*rules[1:], len(cells) + 1], strict=True):
        frames.append(pd.DataFrame(cells[rule + 1 : following - 1], columns=cells[rule - 1]))
    if not frames:
        raise UserError("the program printed no table", "see its output")
    return pd.concat(frames, ignore_index=True)


def values(frame: pd.DataFrame, where: dict[str, str]) -> dict[str, Callable[..., Any]]:
    """The functions with which a claim reads a frame. Each takes a measure and further conditions as a text."""

    def column(measure: str, more: str = "") -> pd.Series:
        rows = matching(frame, where | where_of(more))
        if measure not in rows:
            raise UserError(f"no measure {measure}", choices(map(str, rows.columns), measure))
        return rows[measure]

    def numbers(measure: str, more: str = "") -> pd.Series:
        found = column(measure, more).astype(float)
        if found.isna().any():
            raise UserError(f"a run has no {measure}", "name a measure that all of these runs have")
        return found

    def one(measure: str, more: str = "") -> float:
        found = numbers(measure, more).unique()
        if len(found) != 1:
            raise UserError(f"{len(found)} values of {measure}", "a condition that leaves one")
        return float(found[0])

    def cell(measure: str, index: int = 0, more: str = "") -> float:
        (text_,) = column(measure, more)
        return number(re.findall(NUMBER, text_)[index])

    return {
        "mean": lambda *asked: float(numbers(*asked).mean()),
        "std": lambda *asked: float(numbers(*asked).std(ddof=1)),
        "least": lambda *asked: float(numbers(*asked).min()),
        "most": lambda *asked: float(numbers(*asked).max()),
        "one": one,
        "cell": cell,
    }


def number(printed: str) -> float:
    return float(printed.replace(",", ""))
