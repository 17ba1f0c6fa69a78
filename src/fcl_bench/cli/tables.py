"""The command `fcl-tables`: what runs left behind, as tables and figures, and beside what papers print."""

from __future__ import annotations

import argparse
import io
import logging
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcl_bench.cli.app import DONE
from fcl_bench.cli.side_command import Parser, run_command
from fcl_bench.errors import UserError, require_choice
from fcl_bench.files import replacing
from fcl_bench.results.made import Made

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from fcl_bench.results.tables.cells import Sheet
    from fcl_bench.results.tables.sections import Section

FORMATS = ("csv", "md", "tex")
#: Writes one file at the path it is given.
Writer = Callable[[Path], Any]


def main() -> int:
    """The console script `fcl-tables`; returns the exit code: 0 done, 2 wrong input, 130 interrupted, 1 a bug."""
    return run_command("fcl-tables", _work)


def _work() -> int:
    _tables(_arguments())
    return DONE


def _arguments() -> argparse.Namespace:
    parser = Parser(prog="fcl-tables", description="Tables and figures of the runs that fcl-bench left.")
    parser.add_argument("--out", default="outputs", metavar="FOLDER", help="holds runs/, gets tables/ (outputs)")
    which = (
        "only runs like these: method=fedran,stsa, beta=0.1, seed=0,1; method.rank=512 of the methods with a rank;"
        " may be given repeatedly"
    )
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUE", help=which)
    parser.add_argument("--name", default="summary", help="of the files (summary)")
    formats = ",".join(FORMATS)
    parser.add_argument("--format", default=formats, metavar="LIST", help=f"of the tables ({formats})")
    metrics = "which measures, in this order: A_avg,up_max_mib,seconds_per_task; default: all that any run has"
    parser.add_argument("--metrics", default="", metavar="LIST", help=metrics)
    by = "what tells rows apart: method,beta; what else varies goes into columns; default: all that varies"
    parser.add_argument("--by", default="", metavar="LIST", help=by)
    paper = "instead, a paper's printed tables with ours beside them: fedran, stsa, afl, afcl, fedprotip or all"
    parser.add_argument("--paper", metavar="NAME", help=paper)
    parser.add_argument("--table", metavar="NAME", help='only this table of --paper, such as "Table 4"')
    profile = "of --paper: full, runs of the printed settings; quick, of the experiments in miniature (full)"
    parser.add_argument("--profile", default="full", metavar="NAME", help=profile)
    parser.add_argument("--if-changed", action="store_true", help="do nothing where files, runs and code are as before")
    parser.add_argument("--figures", action="store_true", help="every figure for which there are runs (svg, png)")
    parser.add_argument("--html", action="store_true", help="one page with the tables and figures, to open from disk")
    arguments = parser.parse_args()
    name = arguments.name
    if not name or Path(name).name != name or not name.isprintable() or name.startswith("."):
        raise UserError(f"--name={name} is not a plain file name", "such as --name=summary")
    for key in ("format", "metrics", "by"):
        given = getattr(arguments, key)
        listed = [word.strip() for word in given.split(",")] if given else []
        if not all(listed):
            raise UserError(f"--{key} {given} has an empty entry", "names with commas between them")
        setattr(arguments, key, listed)
    if not arguments.format:
        raise UserError("--format names none", formats)
    for word in arguments.format:
        require_choice("--format", word, FORMATS)
    from fcl_bench.papers.experiments import PROFILES  # only now: help waits for no library

    require_choice("--profile", arguments.profile, PROFILES)
    if arguments.profile != "full" and not arguments.paper:
        raise UserError(f"--profile {arguments.profile} is for printed tables only", "such as --paper all")
    if arguments.table and not arguments.paper:
        raise UserError(f"--table {arguments.table} is a table of no paper", "such as --paper fedran")
    if arguments.paper and (arguments.by or arguments.metrics or arguments.figures):
        raise UserError("--by, --metrics and --figures are not for --paper", "without them, or without --paper")
    return arguments


def _tables(arguments: argparse.Namespace) -> None:
    # Only now, so that help and wrong options wait for no library.
    from fcl_bench.results.collect import collect, selected

    _warn_on_stderr()
    out = Path(arguments.out).expanduser()
    made = Made(out, vars(arguments))
    if arguments.if_changed and made.is_current():
        print(f"nothing to do: {made.files} files in {out / 'tables'} are those of these {made.runs} runs")
        return
    frame = collect(out / "runs")
    if frame.empty and (arguments.where or not arguments.paper):
        raise UserError(f"--out={arguments.out}: no complete run in {out / 'runs'}", "fcl-bench makes runs")
    chosen_runs = frame if frame.empty else selected(frame, arguments.where)
    write = _papers if arguments.paper else _summary
    files = write(arguments, out, chosen_runs)
    if arguments.if_changed:
        made.note(files)


def _summary(arguments: argparse.Namespace, out: Path, frame: pd.DataFrame) -> list[Path]:
    """Today's runs as a table on the screen, and as files, which it returns."""
    from rich.console import Console

    from fcl_bench.results.measures import chosen
    from fcl_bench.results.summarise import summarise, used_runs
    from fcl_bench.results.tables.sections import sections
    from fcl_bench.results.tables.summary_table import NOTE, constants, summary_sheet, terminal_table

    measures = chosen(arguments.metrics)
    runs = used_runs(frame)
    summary = summarise(runs)
    # Labels of rows that have a column for a knob do without it.
    knobs = [key for key in arguments.by if key.startswith("method.")]
    tables = sections(summarise(used_runs(frame, knobs)) if knobs else summary, measures, arguments.by)
    writers = _summary_files(arguments, runs, summary, tables)
    figures = _figures(frame, out / "runs") if arguments.figures or arguments.html else {}
    if arguments.figures:
        for figure, drawn in figures.items():
            writers |= {f"{figure}.svg": drawn.savefig, f"{figure}.png": partial(drawn.savefig, dpi=150)}
    if arguments.html:
        sheets = {"summary": summary_sheet(summary, measures), **{name: table.sheet for name, table in tables.items()}}
        writers["html"] = _page(arguments.name, sheets, figures)
    files = _write(out / "tables", {f"{arguments.name}.{suffix}": write for suffix, write in writers.items()})
    console = Console(highlight=False)
    table, left_out = terminal_table(summary, console.width if console.is_terminal else math.inf, measures)
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
    return files


def _papers(arguments: argparse.Namespace, out: Path, frame: pd.DataFrame) -> list[Path]:
    """The printed tables with ours beside them, as files, which it returns; on screen how many numbers have runs."""
    from fcl_bench.results.summarise import used_runs
    from fcl_bench.results.tables.paper_sheet import RUN
    from fcl_bench.results.tables.paper_tables import cells_of, paper_tables

    cells = cells_of(arguments.paper, arguments.table)
    writers: dict[str, Writer] = {}
    sheets: dict[str, Sheet] = {}
    lines = []
    runs = frame if frame.empty else used_runs(frame)
    for table in paper_tables(cells, runs, out / "runs", arguments.profile):
        sheets[table.name] = table.sheet
        forms = _forms(arguments.format, table.sheet, table.values, table.runs)
        writers |= {f"{table.name}.{suffix}": write for suffix, write in forms.items()}
        done = (table.values["state"] == RUN).sum()
        lines.append(f"{table.sheet.title}: {len(table.values)} printed numbers, {done} with runs of ours")
    if arguments.html:
        writers["papers.html"] = _page("papers", sheets, {})
    folder = "papers" if arguments.profile == "full" else f"papers-{arguments.profile}"
    files = _write(out / "tables" / folder, writers)
    print("\n".join([*lines, *(f"written: {file}" for file in files)]), flush=True)
    return files


def _summary_files(
    arguments: argparse.Namespace, runs: pd.DataFrame, summary: pd.DataFrame, tables: dict[str, Section]
) -> dict[str, Writer]:
    """Suffix -> writer: the summary with its runs and picture, and the tables of `sections`."""
    from fcl_bench.results.figures.bytes_figure import accuracy_against_bytes
    from fcl_bench.results.measures import chosen
    from fcl_bench.results.tables.summary_table import latex, markdown

    measures = chosen(arguments.metrics)
    runs = runs[["label", *runs.columns.drop(["label", "family", "written"])]]
    figure = accuracy_against_bytes(summary)
    forms: dict[str, Writer] = {
        "csv": lambda path: _flat_lists(summary).to_csv(path, index=False),
        "md": lambda path: path.write_text(markdown(summary, measures)),
        "tex": lambda path: path.write_text(latex(summary, measures)),
    }
    writers = {suffix: write for suffix, write in forms.items() if suffix in arguments.format}
    writers["runs.csv"] = lambda path: runs.to_csv(path, index=False)
    writers["png"] = partial(figure.savefig, dpi=150)
    writers["svg"] = figure.savefig
    for name, table in tables.items():
        forms = _forms(arguments.format, table.sheet, table.values, table.runs)
        writers |= {f"{name}.{suffix}": write for suffix, write in forms.items()}
    return writers


def _forms(formats: list[str], sheet: Sheet, values: pd.DataFrame, runs: pd.DataFrame) -> dict[str, Writer]:
    """Suffix -> writer of one table, with the runs behind its cells."""
    from fcl_bench.results.tables.latex import latex_table
    from fcl_bench.results.tables.markdown import markdown_page

    forms: dict[str, Writer] = {
        "csv": lambda path: values.to_csv(path, index=False),
        "md": lambda path: path.write_text(markdown_page(sheet)),
        "tex": lambda path: path.write_text(latex_table(sheet)),
    }
    chosen_forms = {suffix: write for suffix, write in forms.items() if suffix in formats}
    return {**chosen_forms, "runs.csv": lambda path: runs.to_csv(path, index=False)}


def _flat_lists(summary: pd.DataFrame) -> pd.DataFrame:
    lists = {column: [" ".join(map(str, value)) for value in summary[column]] for column in ("seeds", "run_ids")}
    return summary.drop(columns="family").assign(**lists)


def _figures(frame: pd.DataFrame, folder: Path) -> dict[str, Figure]:
    from fcl_bench.results.figures.figure_set import figure_set

    return figure_set(frame, folder)


def _page(title: str, sheets: dict[str, Sheet], figures: dict[str, Figure]) -> Writer:
    from fcl_bench.results.page.page import html_page
    from fcl_bench.results.tables.markdown import marked_frame

    drawings = {}
    for name, figure in figures.items():
        drawing = io.StringIO()
        figure.savefig(drawing, format="svg")
        drawings[name] = drawing.getvalue()
    tables = {name: marked_frame(sheet) for name, sheet in sheets.items()}
    notes = {name: "\n".join(sheet.notes) for name, sheet in sheets.items()}
    page = html_page(title, tables, drawings, notes)
    return lambda path: path.write_text(page, encoding="utf-8")


def _write(folder: Path, writers: dict[str, Writer]) -> list[Path]:
    """Every file, each whole or not at all; returns their paths."""
    files = [folder / name for name in writers]
    try:
        for file, write in zip(files, writers.values(), strict=True):
            with replacing(file) as temporary:
                write(temporary)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}", "another --out or --name") from error
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
