"""Public code beside ours: `python -m benchmarks.peers --peers DIR [--rows large,k100] [--repeats 5]`.

DIR holds checkouts as `git clone` names them: PFLlib, FL-bench, fed-mammoth, Analytic-federated-learning, STSA. What is
missing is told in one line, and the other sides are measured. Every side of a row gets the same model, samples and
batches and runs in a process of its own, in turn with the others. Exit code 1: a side learnt something else than ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from benchmarks.peers.measure import Failed, Measured, measured
from benchmarks.peers.settings import CPU, ROWS, Row
from benchmarks.peers.sides import OURS, SIDES
from benchmarks.peers.table import disagreements, losses, markdown
from fcl_bench import environment


def main(argv: list[str] | None = None) -> int:
    arguments = read(argv)
    peers, size = arguments.peers, ROWS[arguments.size]
    names = list(size) if arguments.rows is None else arguments.rows.split(",")
    wanted = {name for row in names for name in (OURS.name, *size[row].peers)}
    absent = {name: line for name in SIDES if name in wanted and (line := SIDES[name].missing(peers))}
    for line in absent.values():
        tell(line)
    commits = {SIDES[name].repository: SIDES[name].commit(peers) for name in wanted - set(absent)}
    about = {
        "environment": {**environment.describe(CPU), "threads": arguments.threads},
        "commits": {repository: commit for repository, commit in sorted(commits.items()) if repository},
        "repeats": arguments.repeats,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[Row, list[Measured]]] = []
    told = {}
    for name in names:
        row = size[name]
        sides = [SIDES[own] for own in (OURS.name, *row.peers) if own not in absent]
        at = [(side, side.checkout(peers)) for side in sides]
        try:
            found = measured(row, arguments.size, name, at, arguments.repeats, arguments.threads, tell)
        except Failed as failure:  # ours, beside which all others stand
            raise SystemExit(f"{row}: {failure}") from None
        rows.append((row, found))
        tell(f"{row}: {', '.join(f'{SIDES[one.side].title} {one.median:.3g} s' for one in found)}")
        told[name] = {"what": str(row), "sides": [dataclasses.asdict(one) for one in found]}
        # After each row: all of them take long.
        (arguments.out / "peers.json").write_text(json.dumps({**about, "rows": told}, indent=2) + "\n")
        (arguments.out / "peers.md").write_text(markdown(rows))
    apart = list(disagreements(rows))
    for line in ["", markdown(rows), *losses(rows), *apart, f"written: {arguments.out / 'peers.json'}"]:
        tell(line)
    return 1 if apart else 0


def tell(line: str) -> None:
    print(line, flush=True)


def read(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=None, help="the folder of the checkouts")
    parser.add_argument("--rows", default=None, help="some of the rows, with commas between them; all if left out")
    parser.add_argument("--size", default="full", choices=list(ROWS), help="smoke: tiny ones, to see that all runs")
    parser.add_argument("--repeats", type=int, default=5, help="alternations, after one to warm up")
    parser.add_argument("--threads", type=int, default=1, help="of torch in each process")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks"), help="where peers.json goes")
    arguments = parser.parse_args(argv)
    rows = ROWS[arguments.size]
    if unknown := set((arguments.rows or "large").split(",")) - set(rows):
        parser.error(f"--rows={','.join(sorted(unknown))}: there is no such row (the rows are {', '.join(rows)})")
    for key in ("repeats", "threads"):
        if getattr(arguments, key) < 1:
            parser.error(f"--{key}={getattr(arguments, key)} (an integer from 1)")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
