"""A tree of aggregators for 100 to 1,000,000 clients: its costs by formula, and as measured in runs of the command.

For each fan-in, the table has the levels, the messages and the bytes of one task by formula. If the number of clients
allows it, a run with `transport=tree` and a flat one are measured, each in a process of its own: bytes, seconds along
the longest path, and how far the classifiers are apart. The formula of the path takes a link's rate, and the seconds
that a node takes per upload in the last run that was measured.

    python -m benchmarks tree --paper                        # the formulas alone, in seconds
    python -m benchmarks tree --quick                        # 100 clients, under a minute on a free core
    python -m benchmarks tree --markdown outputs/bench/tree.md
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import machine, table, write
from safetensors.torch import load_file
from scaling import Size, arguments_of

CLASSES, WIDTH, RANK = 10, 128, 16
MIB = 2**20


@dataclass(frozen=True)
class Sent:
    """What a method's uploads take.

    Attributes:
        overrides: of the method, beside those of `scaling`.
        upload: bytes on a float32 wire of an upload of so many samples.
        combined: bytes that a combined upload has beside these.
    """

    overrides: tuple[str, ...]
    upload: Callable[[int], int]
    combined: int


METHODS = {
    "afl": Sent((), lambda n: 4 * (WIDTH**2 + WIDTH * CLASSES), 8),
    # So many samples have no more directions, however many the rank allows.
    "fedran": Sent((f"method.rank={RANK}",), lambda n: 4 * (min(n, RANK) * (WIDTH + 1) + WIDTH * CLASSES), 8 + 16),
}


@dataclass(frozen=True)
class Paper:
    """The costs of a tree by formula, for one round.

    Attributes:
        sizes: nodes per level, from the clients up.
        server: messages that the server takes in.
        inside: messages over the links above nodes.
    """

    sizes: tuple[int, ...]
    server: int
    inside: int


def on_paper(clients: int, fan_in: int) -> Paper:
    """The tree of `fan_in` over so many clients, all of whom take part."""
    sizes: list[int] = []
    count = clients
    while count > fan_in:
        count = -(-count // fan_in)
        sizes.append(count)
    return Paper(tuple(sizes), count, sum(sizes))


def inside(name: str, clients: int, samples: int, fan_in: int) -> int:
    """Bytes over all links above nodes in one round, by formula; each client has the same share of the samples."""
    sent, found, below = METHODS[name], 0, 1
    for size in on_paper(clients, fan_in).sizes:
        below *= fan_in
        for node in range(size):
            own = min(below, clients - node * below)
            # A single upload is passed on as it is; it is a combined one if there are several clients below.
            found += sent.upload(samples * own // clients) + (sent.combined if own > 1 else 0)
    return found


def path(clients: int, fan_in: int, upload: int, rate: float, take: float, node: int | None = None) -> float:
    """Seconds from the clients' uploads to the end of the server's sums, where siblings work side by side.

    A node, as the server, receives its children's uploads over one link and takes in one after the other: each level
    costs f (b / rate + take), and a flat server K (b / rate + take).

    Args:
        upload: b, bytes of a client's upload.
        node: bytes of what a node sends; None: as many.
    """
    tree, seconds, below, size_of = on_paper(clients, fan_in), 0.0, clients, upload
    for size in tree.sizes:
        seconds += min(fan_in, below) * (size_of / rate + take)
        below, size_of = size, upload if node is None else node
    return seconds + below * (size_of / rate + take)


def run(name: str, size: Size, folder: Path, *way: str) -> tuple[dict[str, Any], Any]:
    """The record of one run of the command, and its classifier."""
    out = folder / "out"
    arguments = arguments_of(name, size, folder, out, *METHODS[name].overrides, *way)
    done = subprocess.run([sys.executable, "-m", "fcl_bench", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"fcl-bench {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    [file] = out.glob("runs/*/run.json")
    record, model = json.loads(file.read_text()), load_file(file.parent / "model.safetensors")["W"]
    shutil.rmtree(file.parent)
    return record, model


def measured(name: str, size: Size, fan_in: int, folder: Path, flat: dict[str, Any], W: Any) -> dict[str, Any]:
    """A run over the tree beside the flat one and its classifier: bytes, seconds and how far apart they end."""
    tree, V = run(name, size, folder, "transport=tree", f"transport.fan_in={fan_in}")
    levels, paper = tree["transport"]["levels"], on_paper(size.K, fan_in)
    sent, expected = sum(level["up_bytes"] for level in levels), size.T * inside(name, size.K, size.n, fan_in)
    taken = size.T * (size.K + paper.inside - paper.server)
    return {
        "method": name,
        "clients": size.K,
        "fan_in": fan_in,
        "upload": flat["communication"]["up_max_bytes"],
        "node": sent // sum(level["messages"] for level in levels) if levels else None,
        "server_bytes_flat": flat["communication"]["up_total_bytes"],
        "server_bytes": levels[-1]["up_bytes"] if levels else tree["communication"]["up_total_bytes"],
        "inside": sent,
        "of_formula": sent / expected if expected else 1.0,
        "server_seconds_flat": flat["runtime"]["server_seconds"],
        "server_seconds": tree["runtime"]["server_seconds"],
        "path_seconds": tree["transport"]["path_seconds"],
        "client_seconds": flat["runtime"]["client_seconds"] / size.K,
        "take": sum(level["seconds"] for level in levels) / taken if taken else 0.0,
        "apart": float((W - V).abs().max() / W.abs().max()),
        "accuracy": [flat["metrics"]["A_T"], tree["metrics"]["A_T"]],
    }


def paper_rows(
    clients: list[int], fan_ins: list[int], upload: int, node: int, rate: float, take: float
) -> list[list[str]]:
    """One row per number of clients and fan-in, with the flat server first; `upload`, `node`: as in `path`."""
    rows = []
    for K in clients:
        for fan_in in [K, *[f for f in fan_ins if f < K]]:
            tree = on_paper(K, fan_in)
            rows.append(
                [
                    f"{K:,}",
                    "flat" if fan_in == K else f"{fan_in:,}",
                    str(len(tree.sizes)),
                    f"{sum(tree.sizes):,}",
                    f"{tree.server:,}",
                    f"{tree.server * (node if tree.sizes else upload) / MIB:,.1f}",
                    f"{tree.inside * node / MIB:,.1f}",
                    f"{path(K, fan_in, upload, rate, take, node):,.2f}",
                ]
            )
    return rows


PAPER = ["clients", "fan-in", "levels", "nodes", "messages at the server", "MiB at the server", "MiB inside", "path, s"]
RUNS = [
    *("method", "clients", "fan-in", "MiB at the server, flat", "tree", "inside / formula"),
    *("server, s, flat", "tree", "clients and nodes, s, longest path", "ms per upload at a node"),
    *("W apart", "A_T, flat", "tree"),
]


def run_row(found: dict[str, Any]) -> list[str]:
    """One line of `RUNS`."""
    return [
        *(found["method"], f"{found['clients']:,}", f"{found['fan_in']:,}"),
        *(f"{found['server_bytes_flat'] / MIB:.2f}", f"{found['server_bytes'] / MIB:.2f}"),
        *(f"{found['of_formula']:.3f}", f"{found['server_seconds_flat']:.3f}", f"{found['server_seconds']:.3f}"),
        *(f"{found['path_seconds']:.3f}", f"{1e3 * found['take']:.2f}", f"{found['apart']:.1e}"),
        *(f"{accuracy:.2f}" for accuracy in found["accuracy"]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="runs of 100 clients only")
    parser.add_argument("--methods", default=",".join(METHODS), help=f"of {','.join(METHODS)}")
    parser.add_argument("--clients", default="100,1000,10000", help="of the runs")
    parser.add_argument("--fan-in", default="16,100", help="of the runs and on paper")
    parser.add_argument("--paper", action="store_true", help="no runs: the formulas, for --upload and --take")
    parser.add_argument("--upload", type=int, default=1_069_056, help="bytes; default: AFL's, d 512 and 10 classes")
    parser.add_argument("--take", type=float, default=0.84, help="milliseconds of a node, or the server, per upload")
    parser.add_argument("--rate", type=float, default=125e6, help="bytes per second of a link; default: 1 Gbit/s")
    parser.add_argument("--markdown", type=Path, help="write the tables there, too; the numbers beside it as .json")
    chosen = parser.parse_args()
    names, fan_ins = chosen.methods.split(","), [int(f) for f in chosen.fan_in.split(",")]
    if unknown := set(names) - set(METHODS):
        parser.error(f"unknown: {', '.join(unknown)}")
    if min(fan_ins) < 2:
        parser.error("--fan-in: at least 2")
    if chosen.paper:
        names = []
    clients = [100] if chosen.quick else [int(K) for K in chosen.clients.split(",")]
    found: list[dict[str, Any]] = []
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="fcl-bench-tree-") as place:
        for name in names:
            for K in clients:
                size = Size(K=K, T=1, C=CLASSES, M=WIDTH, n=max(2 * K, 5000))
                flat = run(name, size, Path(place))
                for fan_in in (f for f in fan_ins if f < K):
                    found.append(measured(name, size, fan_in, Path(place), *flat))
                    print(f"{name} {K} {fan_in}: {found[-1]['path_seconds']:.2f} s", file=sys.stderr, flush=True)
    largest = found[-1] if found else None
    upload = chosen.upload if largest is None else largest["upload"]
    node = upload if largest is None or largest["node"] is None else largest["node"]
    take = chosen.take / 1e3 if largest is None else largest["take"]
    paper = paper_rows([10**e for e in range(2, 7)], fan_ins, upload, node, chosen.rate, take)
    sizes = f"Uploads of {upload:,} bytes, nodes' of {node:,}"
    told = f"{sizes}, {chosen.rate / 1e6:g} MB/s, {1e3 * take:.2f} ms per upload."
    runs = [table(RUNS, [run_row(one) for one in found])] if found else []
    text = "\n\n".join([*runs, told, table(PAPER, paper)])
    print(text)
    write(chosen.markdown, found, text)


if __name__ == "__main__":
    main()
