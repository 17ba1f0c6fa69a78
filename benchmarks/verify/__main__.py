"""Draw numbers of README, docs and results at random, run their commands, and compare to the last digit.

python -m benchmarks.verify -n 25 --seed 1 --features FEATURES.npz --cifar100 FOLDER

First comes the list of numbers without a command, which has to be empty. Cheap runs are made anew; of dearer ones
(--each, --minutes) the stored row is compared. Seconds and memory are of a machine: of these only the command is looked
up. Stored runs dearer than --each are not drawn. Exit code 1: a number differs, or has no command.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pandas as pd

from benchmarks.verify.claims import Claim, every
from benchmarks.verify.sources import STORED, UNREAD, Bench, Missing, Source, TooDear, matching, number, values
from fcl_bench.config import text
from fcl_bench.errors import UserError

OK, DIFFERS, TIMING, NOT_RUN = "ok", "DIFFERS", "timing only", "not run"
STORED_ONLY, BY_TEST = "ok, stored", "ok, by a test"
#: What a line about a stored run compares.
_MEASURES = ("A_avg", "A_T", "up_max_mib")


def agrees(printed: str, value: float) -> bool:
    """Whether `value`, rounded like `printed`, has its digits."""
    mantissa, _, exponent = printed.partition("e")
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    return abs(number(printed) - value) <= 0.5 * 10.0**-decimals * (1 + 1e-9)


def value_of(claim: Claim, frame: pd.DataFrame) -> float:
    """The expression's value on a source's rows."""
    return float(eval(claim.expression, {**claim.names, **values(frame, claim.where)}))


def checked(claim: Claim, bench: Bench) -> tuple[str, str]:
    """The state of a number, and what was found in words."""
    if claim.source.kind in UNREAD:
        return _unread(claim.source, bench)
    if claim.source.kind == "arithmetic":
        return _compared(claim, value_of(claim, pd.DataFrame()), OK)
    fixed = claim.source.fixed()
    if not fixed.empty:
        state, found = _compared(claim, value_of(claim, fixed), STORED_ONLY)
        if state == DIFFERS:
            return state, f"{found} in results/{claim.source.told['stored']}.csv"
    try:
        fresh = claim.source.fresh(bench, claim.where)
        return _compared(claim, value_of(claim, fresh), OK)
    except (TooDear, Missing) as reason:
        return (NOT_RUN, str(reason)) if fixed.empty else (state, f"{found} ({reason})")


def _unread(source: Source, bench: Bench) -> tuple[str, str]:
    """A test passes or fails; of the others only the command is told, which `every` has found."""
    command = source.commands[0]
    if source.kind != "test":
        return (TIMING if source.kind == "timing" else NOT_RUN), command
    try:
        if command not in bench.printed:
            bench.afford(source.told["cost"])
        bench.program(command)
    except TooDear as reason:
        return NOT_RUN, f"{command} {reason}"
    except UserError as error:
        return DIFFERS, error.what
    return BY_TEST, command


def _compared(claim: Claim, value: float, good: str) -> tuple[str, str]:
    return (good if agrees(claim.printed, value) else DIFFERS), f"{value:.6g}"


def stored_runs(each: float) -> list[Claim]:
    """Every row of results/*.csv that takes no more than `each` seconds, as a claim of what its own command gives."""
    claims = []
    for name in STORED:
        source = Source({"stored": name})
        for index, row in source.affordable(each).iterrows():
            printed = " / ".join(f"{row[measure]:.6g}" for measure in _MEASURES)
            where = {"run_id": text(row["run_id"])}
            claims.append(Claim(f"results/{name}.csv", int(str(index)) + 2, printed, None, source, where, ""))
    return claims


def rerun(claim: Claim, bench: Bench) -> tuple[str, str]:
    """A stored run's state: its command, run now, against its row."""
    try:
        fresh = claim.source.fresh(bench, claim.where)
    except (TooDear, Missing) as reason:
        return NOT_RUN, str(reason)
    found = " / ".join(f"{fresh[measure].iloc[0]:.6g}" for measure in _MEASURES)
    stored = matching(claim.source.fixed(), claim.where)
    same = all(abs(fresh[one].iloc[0] - stored[one].iloc[0]) <= 1e-8 * abs(stored[one].iloc[0]) for one in _MEASURES)
    return (OK if same else DIFFERS), found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "-n", type=int, default=25, help="how many numbers; 0: only the list of those without a command"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--only", default="", metavar="TEXT", help="numbers of pages whose name has TEXT")
    parser.add_argument("--minutes", type=float, default=15, help="processor minutes of all runs together")
    parser.add_argument("--each", type=float, default=120, help="processor seconds that one number may take")
    parser.add_argument("--out", type=Path, help="keep the runs in this folder; a later call takes them from there")
    for variable in ("features", "cifar100", "weights"):
        parser.add_argument(f"--{variable}", default="", help="as in the pages' commands")
    asked = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    try:
        return verified(asked)
    except UserError as error:
        print(f"verify: error: {error}", file=sys.stderr)
        return 2
    finally:
        logging.disable(logging.NOTSET)


def verified(asked: argparse.Namespace) -> int:
    """Print the list and the draw; returns the exit code."""
    claimed = every()
    silent = [line for page in claimed for line in page.silent()]
    print(*silent, f"numbers without a command: {len(silent)}", sep="\n")
    pool = [*(claim for page in claimed for claim in page.claims), *stored_runs(asked.each)]
    kinds = Counter(claim.source.kind for claim in pool)
    print(f"{len(pool)} numbers:", ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    pool = [claim for claim in pool if asked.only in claim.page]
    drawn = random.Random(asked.seed).sample(pool, min(asked.n, len(pool)))
    states: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        files = {name.upper(): getattr(asked, name) for name in ("features", "cifar100", "weights")}
        bench = Bench(asked.out or Path(temporary), files, 60 * asked.minutes, asked.each)
        for claim in sorted(drawn, key=lambda claim: (claim.page, claim.line)):
            try:
                state, found = (checked if claim.span else rerun)(claim, bench)
            except UserError as error:
                state, found = DIFFERS, error.what
            states[state] += 1
            print(f"{claim.page}:{claim.line}: {claim.printed} | {found} | {state}", flush=True)
    print(", ".join(f"{count} {state}" for state, count in sorted(states.items())))
    return int(bool(silent) or states[DIFFERS] > 0)


if __name__ == "__main__":
    sys.exit(main())
