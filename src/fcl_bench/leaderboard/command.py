"""`fcl-bench leaderboard`: run a track, show its table, write its page."""

from __future__ import annotations

import argparse
from pathlib import Path

from fcl_bench.cli.command import BUG, DONE, USER_ERROR, Parser
from fcl_bench.cli.overrides import ordered
from fcl_bench.composition import choices_of
from fcl_bench.environment import available_cores
from fcl_bench.errors import UserError, choices
from fcl_bench.files import locked, replacing, user_path, writable
from fcl_bench.tracking.console import say

_RUN = (
    "Carry out every run of a track that has no row yet: each method's defaults, a search of its knobs on validation "
    "samples, and the runs with what the search chose. The same command goes on where it stopped; once nothing is left "
    "it runs nothing."
)


def work(arguments: list[str]) -> int:
    """Do what is asked for; return 2 if the track refuses a method that was named, 1 if one failed by a bug.

    Raises:
        UserError: wrong options, or a track that refuses every method.
    """
    options = parsed(arguments)
    return int(options.work(options))


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="fcl-bench leaderboard", description="Every method of a track under one protocol.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        usage="fcl-bench leaderboard run TRACK [options] key=value ...",
        help="do the runs that are left, then show",
        description=_RUN,
        epilog="example: fcl-bench leaderboard run features data.path=FEATURES.npz",
    )
    run.set_defaults(work=_run)
    show = commands.add_parser("show", help="print the table and write the page of the rows that are there")
    show.set_defaults(work=_show)
    for command in (run, show):
        command.add_argument("track", metavar="TRACK", help=f"one of {', '.join(choices_of('track'))}, or your own")
        folder = "gets TRACK.csv, TRACK.npy, TRACK.yaml, TRACK.html, and the runs in TRACK/ (outputs/leaderboard)"
        command.add_argument("--out", default="outputs/leaderboard", metavar="FOLDER", help=folder)
    run.add_argument("--methods", type=lambda typed: typed.split(","), metavar="LIST", help="only these: afl,my_method")
    trials = "of each method's search (20); 0: no searches, so no tuned rows"
    run.add_argument("--trials", type=int, default=20, metavar="N", help=trials)
    run.add_argument("--workers", type=int, default=available_cores(), metavar="N", help="processes (the cores)")
    # Between a command's own options, argparse would take no keys.
    keys = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    options = parser.parse_args([argument for argument in arguments if argument not in keys])
    if keys and options.work is not _run:
        raise UserError(f"{keys[0]} is of no use where nothing runs", "fcl-bench leaderboard run TRACK key=value ...")
    options.overrides = ordered(keys)
    return options


def _run(options: argparse.Namespace) -> int:
    # Imported only now, so that errors about wrong options are quick.
    from fcl_bench.leaderboard.running import Running
    from fcl_bench.leaderboard.store import Store
    from fcl_bench.leaderboard.track import read_track

    for name, least in (("trials", 0), ("workers", 1)):
        if getattr(options, name) < least:
            raise UserError(f"--{name} {getattr(options, name)} is out of range", f"{least} or more")
    known = choices_of("method")
    for method in options.methods or ():
        if method not in known:
            raise UserError(f"--methods {method} is not known", choices(known, method))
    track = read_track(options.track, options.overrides)
    out = writable("--out", user_path("--out", options.out))
    with locked(out / f".{track.name}.lock", f"working on the track {track.name}"):
        store = Store(out, track.name)
        store.describe(track, known)
        running = Running(track, store, out / track.name, options.trials, options.workers)
        running.carry_out(options.methods or known, retried=options.methods or ())
        _write(options.track, out)
    for method, why in running.failed.items():
        say(f"failed by a bug: {method}: {why}")
    return BUG if running.failed else USER_ERROR if running.refused.keys() & set(options.methods or ()) else DONE


def _show(options: argparse.Namespace) -> int:
    _write(options.track, user_path("--out", options.out))
    return DONE


def _write(track: str, out: Path) -> None:
    """Print the table of a track and write its page."""
    from fcl_bench.leaderboard.board import board_of, board_page, print_board
    from fcl_bench.leaderboard.store import stored

    board = board_of(stored(track, out))
    print_board(board)
    page = writable("--out", out) / f"{track}.html"
    with replacing(page) as new:
        new.write_text(board_page(board), encoding="utf-8")
    say(f"\nthe page: {page}")
