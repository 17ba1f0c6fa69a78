"""Kills and cuts a federation of three sites at random moments: seconds until it goes on, and the bits of the result.

    make bench-sites BENCH="--out benchmarks/measured"      # an hour on two cores that are busy otherwise, too
    make bench-sites BENCH="--most 6"                       # one of each kind

After an interruption the same command with --state FILE does the rest, but for the run that it interrupted.

The runs are `RUN`, over Flower's own processes on this machine, with a proxy before each node. At random moments, from
the start of the command on, one process is killed (SIGKILL), or all connections of one node are cut. What would start
a process again where sites run it does so here: the SuperLink, the whole node, the server's same command. A row has the
seconds until the server absorbs the next upload, or ends if it has them all; until it absorbs one of that node (for
server and link, of any one node); and how many of the kills were in runs that ended with the model of one process, bit
for bit. No upload may be absorbed that no ledger has.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from report import write

from fcl_bench.files import content_hash
from tests.flower.processes import Start, answers, commands, free_port, waited_for
from tests.flower.proxy import Proxy
from tests.flower.recording import absorbed, never_sent

REPOSITORY = Path(__file__).resolve().parents[1]
RUN = ("method=afl", "data=digits", "clients=3", "tasks=10", "beta=1")
KINDS = ("node", "SuperNode", "worker", "server", "link", "connections")
#: Seconds that a round waits, and after which nothing comes any more.
_DEADLINE, _HANGS = 600, 900


@dataclass
class Kill:
    """A kill or cut: of what, seconds until the next upload and until one of that node; how the run ended."""

    kind: str
    seconds: float
    of_node: float
    same: bool = False
    never_sent: int = 0


class Federation:
    """A SuperLink and three nodes, each behind a proxy, in a folder."""

    def __init__(self, folder: Path, start: Start) -> None:
        self.folder, self._start, self._port, self.runs = folder, start, free_port(), 0
        self._proxies = [Proxy(self._port) for _ in range(3)]
        self._link = self._linked()
        waited_for(lambda: answers(self._port), folder, {"link": self._link})
        self._nodes = [self._node(client) for client in range(3)]

    def _linked(self) -> subprocess.Popen[bytes]:
        options = ("--insecure", "--port", str(self._port), "--database", "link.db")
        return self._start("link", "flower-superlink", *options, "--disable-runtime-dependency-installation")

    def _node(self, client: int) -> subprocess.Popen[bytes]:
        node = (f"link=127.0.0.1:{self._proxies[client].port}", f"clients={client}", "policy=none")
        return self._start(f"node{client}", sys.executable, "-m", "fcl_bench.flower.node", *node, f"out=node{client}")

    def begin(self) -> None:
        """Start the next run."""
        self.runs += 1
        self.name = f"run{self.runs}"
        self.saved = self.folder / f"absorbed-{self.name}"
        self._serve()

    def _serve(self) -> None:
        there = ("transport=flower", f"transport.link=127.0.0.1:{self._port}", f"transport.deadline={_DEADLINE}")
        recorded = (sys.executable, "-m", "tests.flower.recording", str(self.saved))
        self._server = self._start(self.name, *recorded, *RUN, *there, f"out={self.name}")

    def next_upload(self, since: float, clients: Sequence[int] = (0, 1, 2)) -> float:
        """Seconds from a time until an upload of these clients is absorbed, or until the run ends."""
        while time.time() - since < _HANGS:
            later = [line["time"] for line in absorbed(self.saved) if line["client"] in clients]
            if found := [moment - since for moment in later if moment > since]:
                return float(found[0])
            if self.is_over():
                return time.time() - since
            time.sleep(0.05)
        self._server.kill()
        return float("inf")

    def is_over(self) -> bool:
        return self._server.poll() is not None

    def ended(self) -> None:
        """Wait for the end of the run."""
        self._server.wait(_HANGS)

    def model(self, name: str) -> str:
        models = sorted(self.folder.glob(f"{name}/runs/*/model.safetensors"))
        return content_hash(models[0].read_bytes()).hexdigest() if models else "none"

    def disturb(self, kind: str, client: int) -> None:
        """Kill or cut; start again what does not start again by itself."""
        if kind == "connections":
            self._proxies[client].cut()
        elif kind == "server":
            _kill(self._server)
            self._serve()
        elif kind == "link":
            _kill(self._link)
            self._link = self._linked()
        elif kind == "node":
            _kill(self._nodes[client])
            self._nodes[client] = self._node(client)
        else:
            word = "--worker" if kind == "worker" else "fcl_bench.flower.supernode"
            for child in children(self._nodes[client].pid, word):
                os.kill(child, signal.SIGKILL)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def children(parent: int, word: str) -> list[int]:
    """The processes that a process has started and that have a word in their command."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            own = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if own == parent and word in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


@dataclass
class Measured:
    """Seconds to the first upload of an undisturbed run, and of its rounds; the kills of whole runs."""

    first: float = 0.0
    each: float = 0.0
    kills: list[Kill] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path | None) -> Measured:
        if file is None or not file.exists():
            return cls()
        content = json.loads(file.read_text())
        return cls(content["first"], content["each"], [Kill(**kill) for kill in content["kills"]])

    def save(self, file: Path | None) -> None:
        if file is not None:
            file.write_text(json.dumps(asdict(self)))


def undisturbed(federation: Federation, here: str) -> Measured:
    """A run that nothing disturbs."""
    begin = time.time()
    federation.begin()
    first = federation.next_upload(begin)
    federation.ended()
    found = Measured(first, (time.time() - begin - first) / 10)
    print(f"undisturbed: the first upload after {found.first:.1f} s, {found.each:.1f} s a round", flush=True)
    print(f"undisturbed: {'the same bits' if federation.model(federation.name) == here else 'OTHER BITS'}", flush=True)
    return found


def disturbed(federation: Federation, kinds: list[str], found: Measured, rng: random.Random) -> list[Kill]:
    """A run with as many of these kills as it takes; each is removed and printed."""
    pause, own = rng.uniform(0, found.first), []  # also before there are all nodes
    federation.begin()
    while kinds and not federation.is_over():
        time.sleep(pause)
        if federation.is_over():
            break
        kind, client, struck = kinds.pop(0), rng.randrange(3), time.time()
        federation.disturb(kind, client)
        own.append(Kill(kind, federation.next_upload(struck), federation.next_upload(struck, [client])))
        print(own[-1], flush=True)
        pause = rng.uniform(0, found.each)
    federation.ended()
    return own


def measured(most: int, seed: int, folder: Path, start: Start, state: Path | None) -> Measured:
    """So many kills, in as many runs as that takes, after an undisturbed run."""
    federation, found = Federation(folder, start), Measured.read(state)
    subprocess.run([sys.executable, "-m", "fcl_bench", *RUN, "out=here"], cwd=folder, check=True, capture_output=True)
    here = federation.model("here")
    if not found.each:
        found = undisturbed(federation, here)
    rng = random.Random(f"{seed}:{len(found.kills)}")
    done = Counter(kill.kind for kill in found.kills)
    kinds = [kind for number, kind in enumerate(KINDS * most) if number // len(KINDS) >= done[kind]]
    kinds = kinds[: max(0, most - len(found.kills))]
    rng.shuffle(kinds)
    while kinds:
        own = disturbed(federation, kinds, found, rng)
        strange = never_sent(federation.saved, folder.glob("node*/nodes/ledger.jsonl"))
        for kill in own:
            kill.same, kill.never_sent = federation.model(federation.name) == here, len(strange)
        print(f"{federation.name}: same bits: {own and own[0].same}; never sent: {len(strange)}", flush=True)
        found.kills += own
        found.save(state)
    return found


def rows(found: list[Kill]) -> list[dict[str, Any]]:
    """A row for each kind, and one for all."""
    return [
        {
            "killed": kind,
            "n": len(own),
            "median (s)": round(statistics.median(kill.seconds for kill in own), 1),
            "worst (s)": round(max(kill.seconds for kill in own), 1),
            "of that node, median (s)": round(statistics.median(kill.of_node for kill in own), 1),
            "of that node, worst (s)": round(max(kill.of_node for kill in own), 1),
            "same bits": sum(kill.same for kill in own),
            "absorbed, never sent": sum(kill.never_sent for kill in own),
        }
        for kind in (*KINDS, "all")
        if (own := [kill for kill in found if kind in (kill.kind, "all")])
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=42, help="kills and cuts")
    parser.add_argument("--seed", type=int, default=0, help="of moments, order and nodes")
    parser.add_argument("--out", type=Path, help="folder for site_kills.json and .md")
    parser.add_argument("--state", type=Path, help="file with what an interrupted command has measured")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started ends, too
    # Flower starts a process for each message: without compiled modules it takes a second longer.
    given = {"PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}", "PYTHONDONTWRITEBYTECODE": ""}
    with tempfile.TemporaryDirectory(prefix="fcl-kills-") as scratch, commands(Path(scratch), given) as start:
        found = measured(asked.most, asked.seed, Path(scratch), start, asked.state)
    about = {"undisturbed": f"{found.first:.1f} s to the first upload, {found.each:.1f} s a round"}
    write(asked.out and asked.out / "site_kills.json", rows(found.kills), **about)
    for row in rows(found.kills):
        print(row)
    return int(not all(kill.same and not kill.never_sent for kill in found.kills))


if __name__ == "__main__":
    sys.exit(main())
