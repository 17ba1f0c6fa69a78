"""`fcl-bench`, which also saves what its server absorbs: python -m tests.flower.recording FOLDER KEY=VALUE ..."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fcl_bench.cli.app import main
from fcl_bench.engine.blob import packed, unpacked
from fcl_bench.engine.exchange import Reply
from fcl_bench.files import content_hash
from fcl_bench.flower.transport import FlowerTransport

#: The file of a line for each upload, in the order in which they were absorbed.
ABSORBED = "absorbed.jsonl"


def record(folder: Path) -> None:
    """Have every `FlowerTransport` of this process save what its server has absorbed in a folder."""
    exchange = FlowerTransport.exchange

    def recorded(self: FlowerTransport, present: Any, broadcast: Any) -> Iterator[Any]:
        for answer in exchange(self, present, broadcast):
            yield answer
            if isinstance(answer, Reply):  # the loop came back for the next one: it has absorbed this one
                blob = packed(answer.upload)
                (folder / (name := content_hash(blob).hexdigest())).write_bytes(blob)
                line = {"time": time.time(), "client": answer.client, "upload": name, "run": self._run["id"]}
                line |= {key: getattr(broadcast, key) for key in ("task", "round", "stage")}
                with (folder / ABSORBED).open("a") as file:
                    file.write(json.dumps(line) + "\n")

    FlowerTransport.exchange = recorded  # type: ignore[method-assign]


def absorbed(folder: Path) -> list[dict[str, Any]]:
    """The uploads that a server absorbed, oldest first; an unfinished line does not count."""
    text = (folder / ABSORBED).read_text() if (folder / ABSORBED).exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def never_sent(folder: Path, ledgers: Iterable[Path]) -> list[dict[str, Any]]:
    """Of the uploads that a server absorbed those that, bit for bit, no ledger says to have left."""
    entries = [json.loads(line) for ledger in ledgers for line in ledger.read_text().splitlines()]
    turns = [entry for entry in entries if entry["kind"] == "turn" and entry["left"]]
    found = []
    for line in absorbed(folder):
        upload, _ = unpacked((folder / line["upload"]).read_bytes())
        about = ("run", "client", "task", "round", "stage")
        own = [turn for turn in turns if all(turn[name] == line[name] for name in about)]
        sent = [packed(upload, client=turn["client"], asked=turn["asked"]) for turn in own]
        if not any(content_hash(blob).hexdigest() == turn["sent"] for blob, turn in zip(sent, own, strict=True)):
            found.append(line)
    return found


if __name__ == "__main__":
    out = Path(sys.argv.pop(1))
    out.mkdir(parents=True, exist_ok=True)
    record(out)
    sys.exit(main())
