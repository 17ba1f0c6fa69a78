"""A site's ledger: one JSON line for each message that leaves or is refused, each with the hash of the line before it.

Whoever changes or removes a line changes the hashes of all that follow. The last hash, noted elsewhere, also shows
whether lines are missing at the end.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fcl_bench.errors import UserError, printable
from fcl_bench.files import content_hash, locked
from fcl_bench.flower.policy import Policy
from fcl_bench.flower.refusals import SPENT, WITHDRAWN, Refusal
from fcl_bench.options.withdrawal import WITHDRAWAL

log = logging.getLogger(__name__)

#: The name of the file.
LEDGER = "ledger.jsonl"
#: The folder beside it that has what left in runs with `transport.withdrawal`, as run/client/receipt.
SENT = "sent"


def _hash_of(entry: dict[str, Any]) -> str:
    """The hash of a line, which covers the hash of the line before it."""
    text = json.dumps({key: value for key, value in entry.items() if key != "hash"}, sort_keys=True)
    return content_hash(text.encode()).hexdigest()


class SiteLedger:
    """The ledger of one node: `ledger.jsonl` in its folder.

    Args:
        path: of the file; it is made with the first line.
        policy: how much may leave.
    """

    def __init__(self, path: Path, policy: Policy) -> None:
        self.path, self.policy = path, policy
        self._lines, self._size, self._last = 0, 0, ""
        #: Uploads that left, by day; by noise that no other has, the epsilon of its run and the releases with it.
        self._days: Counter[str] = Counter()
        self._epsilon: dict[str, float] = {}
        self._released: defaultdict[str, set[tuple[int, str]]] = defaultdict(set)
        self.withdrawn: set[tuple[str, int]] = set()  # from which run which client
        self._catch_up()

    def _catch_up(self) -> None:
        """Count the lines that are new: other nodes of this machine may write to the same file."""
        for entry, size in read(self.path, self._lines, self._size, self._last):
            self._lines, self._size, self._last = self._lines + 1, self._size + size, entry["hash"]
            if entry["kind"] == WITHDRAWAL:
                self.withdrawn.add((entry["run"], entry["client"]))
            if entry["left"] and entry["kind"] == "turn":
                self._days[entry["time"][:10]] += 1
                if (noise := entry["noise"]) is not None and entry["fields"]:
                    self._epsilon[noise["key"]] = noise["epsilon"]
                    self._released[noise["key"]].add((entry["task"], entry["sent"]))

    def require_left(self, entry: dict[str, Any]) -> None:
        """Raise a `Refusal` if the policy lets no upload with this entry out any more."""
        self._catch_up()
        if (entry["run"], entry["client"]) in self.withdrawn:
            raise Refusal(WITHDRAWN, f"client {entry['client']} has withdrawn from run {entry['run']}", "another run")
        policy, most = self.policy, self.policy.messages_per_day
        if most is not None and self._days[_now()[:10]] >= most:
            raise Refusal(SPENT, f"{most} uploads left today: policy messages_per_day={most}", "another day")
        if policy.epsilon is None or not entry["fields"]:
            return
        noise = entry["noise"]
        total = sum({**self._epsilon, noise["key"]: noise["epsilon"]}.values())
        if total > policy.epsilon:
            why = f"with this run epsilon is {total:g} in all: policy epsilon={policy.epsilon:g}"
            raise Refusal(SPENT, why, "no further run over these samples")
        released = self._released[noise["key"]] | {(entry["task"], entry["sent"])}
        of_task = sum(task == entry["task"] for task, _ in released)
        if of_task > noise["of_task"] or len(released) > noise["of_run"]:
            raise Refusal(SPENT, f"the run's noise is for {noise['of_run']} uploads, and more are asked for", "no more")

    def write(self, entry: dict[str, Any]) -> None:
        """Append a line; it is on the disk when this returns, which is before the message leaves."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.with_name(f".{self.path.name}.lock"), f"writing {self.path}"):
            self._catch_up()
            whole = {"time": _now(), **entry, "before": self._last}
            with self.path.open("ab") as file:
                if file.tell() > self._size:
                    log.warning("%s: the last line has no end, and is cut off: its message did not leave", self.path)
                    file.truncate(self._size)
                file.write(json.dumps({**whole, "hash": _hash_of(whole)}).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def read(path: Path, lines: int = 0, size: int = 0, before: str = "") -> Iterator[tuple[dict[str, Any], int]]:
    """The lines of a ledger and their bytes, oldest first; none where there is no file.

    Args:
        lines, size, before: how many lines and bytes to pass over, and the hash of the last of them.

    Raises:
        UserError: a line was changed, or is missing.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(size)
        for number, line in enumerate(file, lines + 1):
            if not line.endswith(b"\n"):  # a crash or a full disk cut it, or another node is writing it
                return
            try:
                entry = json.loads(line)
                sound = entry["before"] == before and entry["hash"] == _hash_of(entry)
            except (ValueError, KeyError, TypeError):
                sound = False
            if not sound:
                raise UserError(
                    f"{path}: line {number} is not what was written, or a line before it is missing",
                    "a copy of the whole file: a new one would forget what it spent of epsilon and of the day",
                )
            before = entry["hash"]
            yield entry, len(line)


def summary(path: Path) -> str:
    """What a ledger says, by run: what left and what was refused, bytes, fields, smallest groups and epsilon."""
    runs: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    every = [entry for entry, _ in read(path)]
    for entry in every:
        runs[f"{entry['run']} ({entry['method']})"].append(entry)
    found = [f"{path}: {len(every)} lines, none changed; the last hash is {every[-1]['hash'] if every else 'none'}"]
    for run, entries in runs.items():
        left = [entry for entry in entries if entry["left"]]
        fields = [(f"{e['stage']}/{name}", about["least"]) for e in left for name, about in e.get("fields", {}).items()]
        epsilon = {entry["noise"]["key"]: entry["noise"]["epsilon"] for entry in left if entry.get("noise")}
        withdrawn = {entry["client"] for entry in entries if entry["kind"] == WITHDRAWAL}
        codes = Counter(f"error {entry['code']}" for entry in entries if not entry["left"])
        found += [
            f"{run}, {entries[0]['time']} to {entries[-1]['time']}",
            f"  left: {len(left)} messages, {sum(entry['bytes'] for entry in left)} bytes",
            f"  fields: {', '.join(sorted({name for name, _ in fields})) or 'none'}",
            f"  smallest group: {min((least for _, least in fields if least is not None), default='none')}",
            f"  epsilon: {', '.join(map(str, epsilon.values())) or 'no noise'}",
            f"  withdrawn: {', '.join(f'client {client}' for client in sorted(withdrawn)) or 'nobody'}",
            f"  refused: {', '.join(f'{number} by {code}' for code, number in codes.items()) or 'none'}",
        ]
    return "\n".join(printable(line).replace("\n", "\\n") for line in found)
