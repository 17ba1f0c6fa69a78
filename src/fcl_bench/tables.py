"""The command `fcl-tables`: what runs left behind, as one table and one figure."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fcl_bench.app import BUG, DONE, INTERRUPTED, USER_ERROR
from fcl_bench.errors import UserError
from fcl_bench.files import replacing

if TYPE_CHECKING:
    import pandas as pd


class _Parser(argparse.ArgumentParser):
    """Complains in one line, as the rest of the project does."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message, "fcl-tables --help lists the options")


def main() -> int:
    """The console script `fcl-tables`; returns the exit code: 0 done, 2 wrong input, 130 interrupted, 1 a bug."""
    try:
        _tables(_arguments())
        return DONE
    except UserError as error:
        print(f"fcl-tables: error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("fcl-tables: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output (`| head`) has gone; the files are written by then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception:
        traceback.print_exc()
        return BUG


def _arguments() -> argparse.Namespace:
    parser = _Parser(prog="fcl-tables", description="One table and one figure of the runs that fcl-bench left.")
    parser.add_argument("--out", default="outputs", metavar="FOLDER", help="holds runs/, gets tables/ (outputs)")
    which = (
        "only runs like these: method=fedran,stsa, beta=0.1, seed=0,1; method.rank=512 of the methods with a rank;"
        " may be given repeatedly"
    )
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUE", help=which)
    parser.add_argument("--name", default="summary", help="of the files (summary)")
    arguments = parser.parse_args()
    name = arguments.name
    if not name or Path(name).name != name or not name.isprintable() or name.startswith("."):
        raise UserError(f"--name={name} is not a plain file name", "such as --name=summary")
    return arguments


def _tables(arguments: argparse.Namespace) -> None:
    # Only now, so that help and wrong options wait for no library.
    from rich.console import Console

    from fcl_bench.report.collect import collect, selected
    from fcl_bench.report.summary import summarise, used_runs
    from fcl_bench.report.summary_table import NOTE, constants, terminal_table

    _warn_on_stderr()
    out = Path(arguments.out).expanduser()
    frame = collect(out / "runs")
    if frame.empty:
        raise UserError(f"--out={arguments.out}: no complete run in {out / 'runs'}", "fcl-bench makes runs")
    runs = used_runs(selected(frame, arguments.where))
    summary = summarise(runs)
    files = _write(out / "tables", arguments.name, runs, summary)
    console = Console(highlight=False)
    table, left_out = terminal_table(summary, console.width if console.is_terminal else math.inf)
    if not console.is_terminal:
        console.width = 10_000
    lines = [*constants(summary), table, NOTE]
    if left_out:
        lines.append(f"Too wide for this terminal, in the files only: {', '.join(left_out)}.")
    # Through a string: rich would end the program itself when the reader leaves early.
    with console.capture() as shown:
        for line in lines:
            console.print(line, markup=False, soft_wrap=True)
    print(shown.get() + "\n".join(f"written: {file}" for file in files), flush=True)


def _write(folder: Path, name: str, runs: pd.DataFrame, summary: pd.DataFrame) -> list[Path]:
    """Every file, each whole or not at all; returns their paths."""
    from fcl_bench.report.bytes_figure import accuracy_against_bytes
    from fcl_bench.report.summary_table import markdown

    lists = {column: [" ".join(map(str, value)) for value in summary[column]] for column in ("seeds", "run_ids")}
    runs = runs[["label", *runs.columns.drop(["label", "family", "written"])]]
    figure = accuracy_against_bytes(summary)
    writers: dict[str, Callable[[Path], Any]] = {
        "csv": lambda path: summary.drop(columns="family").assign(**lists).to_csv(path, index=False),
        "md": lambda path: path.write_text(markdown(summary)),
        "runs.csv": lambda path: runs.to_csv(path, index=False),
        "png": lambda path: figure.savefig(path, dpi=150),
        "svg": figure.savefig,
    }
    files = [folder / f"{name}.{suffix}" for suffix in writers]
    try:
        for file, write in zip(files, writers.values(), strict=True):
            with replacing(file) as temporary:
                write(temporary)
    except OSError as error:
        raise UserError(
            f"{folder / name} cannot be written: {error.strerror or error}", "another --out or --name"
        ) from error
    return files


def _warn_on_stderr() -> None:
    """The package's warnings, on stderr; in place of a run's own handlers where this process has done one."""
    package, handler = logging.getLogger("fcl_bench"), logging.StreamHandler(sys.stderr)
    for old in [handler for handler in package.handlers if handler.name == "terminal"]:
        package.removeHandler(old)
    handler.name = "terminal"
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("fcl-tables: warning: %(message)s"))
    package.addHandler(handler)


if __name__ == "__main__":
    sys.exit(main())
