"""The command `fcl-bench-data`: list data sets, download them ahead of a run, and mend damaged downloads."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import TYPE_CHECKING

from fcl_bench.cli.command import DONE, Parser, run_command
from fcl_bench.cli.knobs import choices_of
from fcl_bench.cli.overrides import composed_as_typed, ordered, without_folders
from fcl_bench.errors import UserError, require_choice
from fcl_bench.tracking.console import log_to_terminal

if TYPE_CHECKING:
    from fcl_bench.data.sources.base import Source
    from fcl_bench.data.sources.hub import Repository

log = logging.getLogger(__name__)


def main() -> int:
    """The console script `fcl-bench-data`; returns the exit code: 0 done, 2 wrong input or data, 130, or 1 (a bug)."""
    return run_command("fcl-bench-data", _work, "the same command goes on where it stopped")


def _work() -> int:
    parser = Parser(prog="fcl-bench-data", description="The data sets of fcl-bench on this machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    what = "every data set: its size, licence, hub name and revision, and whether it is here"
    commands.add_parser("list", help=what).set_defaults(work=_list)
    what = "download it, or what an interrupted download left; verify checksums, and get damaged files again"
    prepare = commands.add_parser("prepare", help=what, description=f"prepare: {what}")
    prepare.add_argument("name", metavar="NAME", help="as in data=NAME")
    prepare.add_argument("keys", nargs="*", metavar="data.KEY=VALUE", help="such as data.path=FOLDER")
    prepare.set_defaults(work=_prepare)
    arguments = parser.parse_args(without_folders(sys.argv[1:]))
    log_to_terminal("fcl-bench-data")
    arguments.work(arguments)
    return DONE


def _list(_: argparse.Namespace) -> None:
    from rich.filesize import decimal
    from rich.table import Table

    from fcl_bench.execution.screen import ScreenConsole

    table = Table(box=None, pad_edge=False)
    numeric = ("classes", "train", "test", "download")
    for column in ("data", *numeric, "here", "hub name", "revision", "licence"):
        table.add_column(column, justify="right" if column in numeric else "left")
    for name in choices_of("data"):
        source = _source(name, [])
        facts = source.about
        wanted = source.repositories()
        numbers = ["" if number is None else f"{number:,}" for number in (facts.classes, facts.train, facts.test)]
        size = "" if facts.megabytes is None else decimal(facts.megabytes * 1_000_000)
        repos = ", ".join(one.repo for one in wanted)
        revisions = ", ".join((one.revision or "main")[:8] for one in wanted)
        table.add_row(name, *numbers, size, _presence(source, wanted), repos, revisions, facts.licence)
    ScreenConsole().print(table)


def _presence(source: Source, wanted: list[Repository]) -> str:
    from fcl_bench.data.sources.hub import locate

    if not wanted:
        return "data.path=..." if hasattr(source, "path") else "yes"
    here = sum(locate(one) is not None for one in wanted)
    return "yes" if here == len(wanted) else "no" if not here else f"{here} of {len(wanted)}"


def _prepare(arguments: argparse.Namespace) -> None:
    from fcl_bench.data.sources.hub import damaged, download, locate, remove_file

    source = _source(arguments.name, arguments.keys)
    for wanted in source.repositories():
        found = locate(wanted)
        bad = [] if found is None else damaged(found.folder) or []
        for file in bad:
            log.warning("data %s: %s is damaged and will be downloaded again", wanted.data, file)
            remove_file(file)
        if found is None or bad:
            found = download(wanted)
        log.info("data %s: %s at %s is in %s", wanted.data, wanted.repo, found.folder.name, found.folder)
    dataset = source.load()
    print(f"data={source.name} is ready: {len(dataset.train):,} training and {len(dataset.test):,} test samples")


def _source(name: str, keys: list[str]) -> Source:
    """The source that `fcl-bench data=NAME data.KEY=VALUE ...` would use."""
    from fcl_bench.config import load_settings

    require_choice("data", name, choices_of("data"))
    for key in keys:
        if not key.lstrip("+").startswith("data."):
            raise UserError(f"{key} is no key of data", "data.KEY=VALUE, such as data.path=FOLDER")
    return load_settings(composed_as_typed([f"data={name}", *ordered(keys)])).data


if __name__ == "__main__":
    sys.exit(main())
