"""The command `fcl-tables`: tables and figures of runs, and comparisons with the numbers that papers print."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcl_bench.cli.command import DONE, Parser, run_command
from fcl_bench.errors import UserError, require_choice
from fcl_bench.files import locked, remove_leftovers, replacing, user_path
from fcl_bench.results.measures import MEASURES, by_task, measure_named
from fcl_bench.tracking.console import log_to_terminal

if TYPE_CHECKING:
    import pandas as pd

    from fcl_bench.results.figures.canvas import Drawing
    from fcl_bench.results.tables.cells import Sheet

FORMATS = ("csv", "md", "tex")


def main() -> int:
    """The console script `fcl-tables`; returns the exit code: 0 done, 2 wrong input, 130 interrupted, 1 a bug."""
    return run_command("fcl-tables", _tables)


def _arguments() -> argparse.Namespace:
    parser = Parser(prog="fcl-tables", description="Tables and figures of the runs that fcl-bench left.")
    out = "holds runs/, gets tables/ (outputs; outputs/quick has the runs of profile=quick)"
    parser.add_argument("--out", default="outputs", metavar="FOLDER", help=out)
    which = (
        "only runs like these: method=fedran,stsa, beta=0.1, seed=0,1; method.rank=512 of the methods with a rank;"
        " profile=full, experiment=NAME, or any key of run.json; may be given repeatedly"
    )
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUE", help=which)
    sweep = "only the runs of this sweep (a folder in sweeps/; the end of a sweep prints it)"
    sweeps = parser.add_mutually_exclusive_group()
    sweeps.add_argument("--sweep", metavar="ID", help=sweep)
    latest = "only the runs of the latest sweep"
    sweeps.add_argument("--latest", dest="sweep", action="store_const", const="", help=latest)
    parser.add_argument("--name", type=_file_name, default="summary", help="of the files (summary)")
    tables = f"of the tables ({','.join(FORMATS)})"
    parser.add_argument("--format", type=_list_of("--format", FORMATS), default=FORMATS, metavar="LIST", help=tables)
    metrics = (
        "which measures, in this order: A_avg,up_max_mib,seconds_per_task, or after the third task A_3,S_3,P_3,R_3;"
        " default: all that any run has"
    )
    parser.add_argument("--metrics", type=_metrics, default=[], metavar="LIST", help=metrics)
    by = "what tells rows apart: method,beta; what else varies goes into columns; default: all that varies"
    parser.add_argument("--by", type=_list_of("--by"), default=[], metavar="LIST", help=by)
    paper = "instead, a paper's printed tables with ours beside them: fedran, stsa, afl, afcl, fedprotip or all"
    parser.add_argument("--paper", metavar="NAME", help=paper)
    parser.add_argument("--table", metavar="NAME", help='only this table of --paper, such as "Table 4"')
    figures = (
        "figures (pdf, svg, png, captions beside them), any of docs/how-to/figures.md; without a LIST every"
        " one for which there are runs"
    )
    parser.add_argument("--figures", nargs="?", const="", metavar="LIST", type=_figures, help=figures)
    together = (
        "keys of the setting that tell rows of one panel and block apart, not settings: features, for methods that"
        " train inside a network beside closed forms on its features"
    )
    parser.add_argument("--together", type=_list_of("--together"), default=[], metavar="LIST", help=together)
    reference = (
        "beside yours, our own runs of the same settings, those behind README and docs (LIST: of those in results/);"
        " where you have no runs, ours alone"
    )
    parser.add_argument(
        "--reference", nargs="?", const="", metavar="LIST", type=_list_of("--reference"), help=reference
    )
    parser.add_argument("--html", action="store_true", help="one page with the tables and figures, to open from disk")
    parser.set_defaults(command=shlex.join(["fcl-tables", *sys.argv[1:]]))
    arguments = parser.parse_args()
    if arguments.table and not arguments.paper:
        raise UserError(f"--table {arguments.table} is a table of no paper", "such as --paper fedran")
    others = (arguments.by, arguments.metrics, arguments.together, arguments.figures, arguments.reference is not None)
    if arguments.paper and any(others):
        raise UserError("--by, --metrics, --together, --figures and --reference are not for --paper", "without them")
    return arguments


def _file_name(given: str) -> str:
    if not given or Path(given).name != given or not given.isprintable() or given.startswith("."):
        raise UserError(f"--name={given} is not a plain file name", "such as --name=summary")
    return given


def _list_of(option: str, known: Iterable[str] = ()) -> Callable[[str], list[str]]:
    """A reader of comma-separated names; if `known` is not empty, it accepts only those."""

    def read(given: str) -> list[str]:
        names = [name.strip() for name in given.split(",")] if given else []
        if not all(names):
            raise UserError(f"{option} {given} has an empty entry", "names with commas between them")
        for name in names if known else ():
            require_choice(option, name, known)
        return list(dict.fromkeys(names))

    return read


def _figures(given: str) -> list[str]:
    """Read names of figures; all figures if there is none."""
    from fcl_bench.results.figures.figure_set import FIGURES

    return _list_of("--figures", FIGURES)(given) or list(FIGURES)


def _metrics(given: str) -> list[str]:
    """Read names of measures: those in `MEASURES`, or measures of a single task."""
    names = _list_of("--metrics")(given)
    _list_of("--metrics", [*MEASURES, *filter(by_task, names)])(given)
    return names


def _tables() -> int:
    arguments = _arguments()
    # Libraries are imported only now, so that help and errors about wrong options are quick.
    from fcl_bench.results.collect import collect, of_sweep, selected
    from fcl_bench.results.reference import beside

    log_to_terminal("fcl-tables: warning", notes=False)
    out = user_path("--out", arguments.out)
    frame = collect(out / "runs", arguments.metrics)
    is_ours = frame.empty and arguments.reference is not None
    if is_ours:
        frame = beside(frame, arguments.reference)
    if frame.empty and (arguments.where or not arguments.paper):
        raise UserError(f"--out={arguments.out}: no complete run in {out / 'runs'}", "fcl-bench makes runs")
    chosen_runs = frame if frame.empty else selected(frame, arguments.where)
    if not frame.empty and arguments.sweep is not None:
        chosen_runs = of_sweep(chosen_runs, out, arguments.sweep)
    if arguments.reference is not None and not is_ours:
        chosen_runs = beside(chosen_runs, arguments.reference)
    write = _papers if arguments.paper else _summary
    print(_written(write(arguments, out, chosen_runs)), flush=True)
    return DONE


def _written(files: list[Path]) -> str:
    """One line: the number of files of each kind, and the common start of their names."""
    kinds = ", ".join(dict.fromkeys(file.suffix.removeprefix(".") for file in files))
    if len(files) == 1:
        return f"written: {files[0]}"
    start = os.path.commonprefix([file.name for file in files])  # noqa: RUF071 (of names, not of paths)
    return f"written: {len(files)} files, {files[0].parent / start}* ({kinds})"


def _summary(arguments: argparse.Namespace, out: Path, frame: pd.DataFrame) -> list[Path]:
    """Show the runs as a table on the screen and write the files of tables and figures; return the files' paths."""
    from fcl_bench.results.collect import mixed
    from fcl_bench.results.page.page import html_page
    from fcl_bench.results.summarise import split_by_setting, summarise, used_runs
    from fcl_bench.results.tables.markup import table_files
    from fcl_bench.results.tables.sections import sections, summary_table

    measures = [measure for name in arguments.metrics if (measure := measure_named(name))]
    frame = split_by_setting(frame, arguments.together)
    runs = used_runs(frame)
    summary = summarise(runs)
    # A knob with its own column is left out of the labels.
    knobs = [key for key in arguments.by if key.startswith("method.")]
    known: dict[str, Any] = {}
    whole = summary_table(runs, summary, measures, known)
    parts = sections(summarise(used_runs(frame, knobs)) if knobs else summary, measures, arguments.by, known)
    tables = {"": whole, **{f"{name}.": table for name, table in parts.items()}}
    contents: dict[str, str | bytes] = {}
    doubts = mixed(runs)
    for prefix, table in tables.items():
        table.sheet.notes[:0] = doubts
        forms = table_files(table, arguments.format)
        # The whole table cites what its parts cite.
        contents |= {f"{prefix}{suffix}": text for suffix, text in forms.items() if not prefix or suffix != "bib"}
    wanted = arguments.figures or []
    figures: dict[str, Drawing] = {}
    if wanted or arguments.html:
        from fcl_bench.results.figures.canvas import captions, pictures
        from fcl_bench.results.figures.curves import chart_rows
        from fcl_bench.results.figures.figure_set import FIGURES, figure_set
        from fcl_bench.results.figures.selection import KINDS

        once = frame[frame["run_id"].isin(runs["run_id"])]
        figures = figure_set(once, out / "runs", FIGURES if arguments.html else wanted)
        _require_figures(wanted, figures, arguments.reference is not None)
    shown: dict[str, tuple[bytes, str]] = {}
    for name, figure in figures.items():
        drawn = pictures(figure, KINDS if name in wanted else ("svg",))
        shown[name] = drawn["svg"], figure.caption
        files_of: dict[str, str | bytes] = {**drawn, **captions(figure)}
        contents |= {f"{name}.{suffix}": content for suffix, content in files_of.items() if name in wanted}
    if arguments.html:
        sheets = {table.name: table.sheet for table in tables.values()}
        day = f", {date.fromtimestamp(newest)}" if (newest := runs["written"].max()) else ""  # 0: reference results
        title = f"{arguments.name}: {len(runs)} runs on {', '.join(sorted(map(str, set(runs['data']))))}{day}"
        contents["html"] = html_page(title, sheets, shown, arguments.command, chart_rows(summary))
    files = _write(out / "tables", {f"{arguments.name}.{suffix}": content for suffix, content in contents.items()})
    _show(summary, whole.sheet, bool(measures), doubts)
    return files


def _require_figures(wanted: list[str], figures: Mapping[str, Drawing], with_reference: bool) -> None:
    """Raise a `UserError` if a figure that was asked for by name has too few runs."""
    from fcl_bench.results.figures.figure_set import FIGURES

    missing = [name for name in wanted if name not in figures]
    if missing and wanted != list(FIGURES):
        there = (
            f"there are runs for {', '.join(figures)}" if figures else "docs/how-to/figures.md says what each one needs"
        )
        without = " (reference results have no curves and no seconds)" if with_reference else ""
        raise UserError(f"--figures {missing[0]}: too few runs for it, or flat lines only{without}", there)


def _show(summary: pd.DataFrame, sheet: Sheet, whole: bool, doubts: list[str]) -> None:
    """Print the summary on the screen: the table first, then what it means; settings are in the files."""
    from fcl_bench.execution.screen import ScreenConsole
    from fcl_bench.results.tables.sections import screen_table

    console = ScreenConsole()
    table, left_out = screen_table(summary, sheet, console.width, whole)
    console.print(table)
    for note in (*doubts, sheet.notes[-1]):
        console.print(note, markup=False)
    console.print(f"In the files only: {'; '.join(['settings', *left_out])}.", markup=False)


def _papers(arguments: argparse.Namespace, out: Path, frame: pd.DataFrame) -> list[Path]:
    """Write the printed tables with our numbers beside them; print how many have runs, and return the files' paths."""
    from fcl_bench.papers.tables import HAS_RUNS, paper_tables, printed_cells
    from fcl_bench.results.page.page import html_page
    from fcl_bench.results.summarise import used_runs
    from fcl_bench.results.tables.markup import table_files

    cells = printed_cells(arguments.paper, arguments.table)
    runs = frame if frame.empty else used_runs(frame)
    tables = list(paper_tables(cells, runs, out / "runs"))
    contents: dict[str, str | bytes] = {
        f"{table.name}.{suffix}": content
        for table in tables
        for suffix, content in table_files(table, arguments.format).items()
    }
    if arguments.html:
        title = f"Printed tables of papers ({arguments.paper}), {date.today()}"
        contents["papers.html"] = html_page(title, {one.name: one.sheet for one in tables}, {}, arguments.command)
    files = _write(out / "tables" / "papers", contents)
    for table in tables:
        done = (table.values["state"] == HAS_RUNS).sum()
        print(f"{table.sheet.title}: {len(table.values)} printed numbers, {done} with runs of ours")
    return files


def _write(folder: Path, contents: Mapping[str, str | bytes]) -> list[Path]:
    """Write every file, each whole or not at all; return their paths."""
    files = [folder / name for name in contents]
    file = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock", f"writing to {folder}"):
            for file, content in zip(files, contents.values(), strict=True):
                remove_leftovers(file)
                with replacing(file) as temporary:
                    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}", "another --out or --name") from error
    return files


if __name__ == "__main__":
    sys.exit(main())
