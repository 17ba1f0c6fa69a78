"""`fcl-bench runs`: list runs, compare two, verify or sign them, pack one into a file, and delete what is of no use."""

from __future__ import annotations

import argparse
import re
import sys
import zipfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from fcl_bench.cli.command import DONE, Parser
from fcl_bench.errors import UserError, printable, require_choice
from fcl_bench.files import remove, replacing, user_path
from fcl_bench.results.measures import MEASURES
from fcl_bench.tracking.console import log_to_terminal

if TYPE_CHECKING:
    from fcl_bench.config import Settings

_VERIFY = (
    "Recompute each run's id from config.yaml, its metrics from stored answers and matrices and its bytes from "
    "uploads.csv, and compare them with what it says; exit with 2 unless all agree. A folder that was made up as a "
    "whole agrees with itself."
)
_COMPARED = ("A_avg", "A_T", "forgetting", "up_max_mib", "up_total_max_mib", "down_max_mib", "seconds_per_task")
_PLACES = ("runs", "quick/runs")
#: How a run's folder ends, and what is said of a second folder with the same run.
_NAMED, _DOUBLE = re.compile("-[0-9a-f]{12}$"), "the same run as "
_SIGN = "Sign each run's record, and so all files whose checksums it has, with an Ed25519 key (RFC 8032)."
_EXPORT = "Pack all files of a run into one: `fcl-bench runs verify` takes the folder that is in it."
_CLEAN = (
    "List the folders in OUT/runs and OUT/quick/runs that hold no complete run, a damaged one, or the same run as "
    "another folder, with their sizes; ask, and delete them. Runs that are going on stay."
)


def work(arguments: list[str]) -> int:
    """Do what is asked for. Raises a `UserError` for wrong options, and for runs that contradict themselves."""
    options = parsed(arguments)
    # Imported only now, so that errors about wrong options are quick.
    from fcl_bench.execution.folder import run_folder

    options.work([run_folder(given, options.out) for given in getattr(options, "runs", ())], options)
    return DONE


def parsed(arguments: list[str]) -> argparse.Namespace:
    what = "List runs; compare, verify, sign or pack complete ones; delete others."
    parser = Parser(prog="fcl-bench runs", description=what)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    what = "a row per run, the newest first: method, data set, the settings in which they differ, accuracies, upload"
    listed = commands.add_parser("list", help="a row per run, the newest first", description=what)
    listed.set_defaults(work=_list)
    where = "only complete runs like these: beta=0.1, method=afl,stsa, profile=quick; may be given repeatedly"
    listed.add_argument("--where", action="append", default=[], metavar="KEY=VALUE", help=where)
    listed.add_argument("--sort", metavar="MEASURE", help="the best first: A_T, A_avg or another of fcl-tables")
    verify = commands.add_parser("verify", help="recompute what runs say from what they store", description=_VERIFY)
    verify.set_defaults(work=_verify)
    signer = "a public key that must have signed them: base64 as printed, or a PEM file"
    verify.add_argument("--signer", metavar="KEY", help=signer)
    sign = commands.add_parser("sign", help="sign the records of runs", description=_SIGN)
    sign.set_defaults(work=_sign)
    key = "a private key, unencrypted PEM; openssl genpkey -algorithm ed25519 makes one"
    sign.add_argument("--key", metavar="FILE", required=True, help=key)
    compare = commands.add_parser("compare", help="settings that differ, accuracies, bytes and seconds of two runs")
    compare.set_defaults(work=_compare)
    export = commands.add_parser("export", help="pack a run into one file, FOLDER'S NAME.zip", description=_EXPORT)
    export.set_defaults(work=_export)
    export.add_argument("--to", metavar="FILE", help="another name for the file")
    withdraw = commands.add_parser("withdraw", help="take a site out of the model of a run that is not going on")
    withdraw.set_defaults(work=_withdraw)
    withdraw.add_argument("run", metavar="RUN", help="folder of a run, or id of a complete one")
    withdraw.add_argument("sent", metavar="FOLDER", help="what the site sent, as fcl-bench-node withdraw names it")
    clean = commands.add_parser("clean", help="delete unfinished, damaged and double runs", description=_CLEAN)
    clean.set_defaults(work=_clean)
    clean.add_argument("--yes", action="store_true", help="delete without asking")
    for command in (compare, verify, sign, export):
        command.add_argument("runs", metavar="RUN", nargs="+", help="folder or id of a run")
    for command in (listed, compare, verify, sign, export, clean, withdraw):
        out = "has the runs, in runs/ and quick/runs/ (outputs)"
        command.add_argument("--out", default="outputs", metavar="FOLDER", help=out)
    return parser.parse_args([f"--{typed}" if typed.startswith("out=") else typed for typed in arguments])


def _list(_: list[Path], options: argparse.Namespace) -> None:
    """Print a row per run; where the terminal is narrow, without the last columns."""
    import pandas as pd

    from fcl_bench.execution.screen import ScreenConsole
    from fcl_bench.results.collect import collect, selected
    from fcl_bench.results.listing import listing, named
    from fcl_bench.results.tables.sections import screen_table

    if options.sort:
        require_choice("--sort", options.sort, MEASURES)
    log_to_terminal("fcl-bench: warning", notes=False)
    out = user_path("--out", options.out)
    runs = pd.concat([collect(out / place) for place in _PLACES], ignore_index=True)
    begun = pd.DataFrame([] if options.where else _begun(out))
    if runs.empty and begun.empty:
        print(f"no run in {out / 'runs'}: fcl-bench makes runs")
        return
    runs = runs if runs.empty else named(selected(runs, options.where))
    sheet, console = listing(pd.concat([runs, begun], ignore_index=True), options.sort), ScreenConsole()
    table, left_out = screen_table(pd.DataFrame(index=range(len(sheet.rows))), sheet, console.width, whole=True)
    if not console.is_terminal:  # plain lines for other programs
        table.box, table.pad_edge = None, False
    console.print(table)
    if left_out:
        console.print(f"No room for: {', '.join(left_out)}.", markup=False)


def _begun(out: Path) -> Iterator[dict[str, Any]]:
    """The rows of `listing` of runs that are not complete."""
    for folder in _folders(out):
        (name, _, run), log = folder.name.rpartition("-"), folder / "run.log"
        if _NAMED.search(folder.name) and log.exists() and not (folder / "run.json").exists():
            state = "unfinished" if (folder / "checkpoint").is_dir() else "failed or stopped"
            try:
                with _lock(folder):
                    pass
            except (Timeout, PermissionError) as error:  # of somebody else's folder
                state = "running" if isinstance(error, Timeout) else state
            yield {"run": f"{name} [{state}]", "run_id": run, "written": log.stat().st_mtime}


def _compare(folders: list[Path], _: argparse.Namespace) -> None:
    """Print the settings in which two runs differ and their measures, with intervals where answers are stored."""
    from fcl_bench.config import text
    from fcl_bench.execution.folder import RunFolder
    from fcl_bench.execution.screen import ScreenConsole, screen_table
    from fcl_bench.results.best import BEST, judged
    from fcl_bench.results.collect import RUN_COLUMNS, frame_of, run_row
    from fcl_bench.results.tables.cells import NOT_DEFINED

    records = [RunFolder(folder).complete_record() for folder in folders]
    if len(folders) != 2 or None in records:
        raise UserError("runs compare takes two complete, undamaged runs", "fcl-bench runs compare RUN RUN")
    runs = frame_of([run_row(folder, record) for folder, record in zip(folders, records, strict=True) if record])
    configured = [key for key in runs if key not in (*RUN_COLUMNS[1:], *MEASURES)]
    rows = [(key, *runs[key].map(text), "") for key in configured if runs[key].map(text).nunique() > 1]
    for name in _COMPARED:
        known = [{seed: (value, path)} for seed, value, path in runs[["seed", name, "path"]].itertuples(index=False)]
        reasons = [verdict.why for verdict in judged(known, name, MEASURES[name].higher) if verdict.why != BEST]
        values = runs[name].map("{:.4g}".format).replace("nan", NOT_DEFINED)
        rows.append((MEASURES[name].header, *values, "".join(reasons[:1])))
    ScreenConsole().print(screen_table("", ("", *(folder.name for folder in folders), "paired"), rows))


def _export(folders: list[Path], options: argparse.Namespace) -> None:
    from fcl_bench.execution.folder import RunFolder

    if len(folders) != 1 or RunFolder(folders[0]).complete_record() is None:
        raise UserError("runs export takes one complete, undamaged run", "fcl-bench runs export RUN")
    [folder], to = folders, user_path("--to", options.to or f"{folders[0].name}.zip")
    if to.exists():
        raise UserError(f"{to} is there already", "--to another file")
    with replacing(to) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.iterdir()):
            archive.write(file, f"{folder.name}/{file.name}")
    print(f"written: {to} ({to.stat().st_size / 2**20:.2f} MiB)")


def _clean(_: list[Path], options: argparse.Namespace) -> None:
    from fcl_bench.execution.folder import RunFolder

    found, deleted = list(_useless(user_path("out", options.out))), []
    sizes = [sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20 for folder, _ in found]
    for size, (folder, why) in zip(sizes, found, strict=True):
        print(printable(f"{size:9.2f} MiB  {folder}: {why}"))
    what = f"{len(found)} folders, {sum(sizes):.2f} MiB"
    if found and not options.yes and not sys.stdin.isatty():
        raise UserError(f"{what}: nobody can be asked here, so nothing is deleted", "--yes deletes them")
    if not found or not (options.yes or _agreed(f"delete {what}? [y/N] ")):
        print(f"deleted: nothing{'' if found else ', no folder is of no use'}")
        return
    for size, (folder, why) in zip(sizes, found, strict=True):
        with suppress(Timeout), _lock(folder):
            # Its run may have gone on meanwhile, and be complete now.
            if why.startswith(_DOUBLE) or RunFolder(folder).checked()[0] is None:
                remove(folder)
                deleted.append(size)
    kept = f"; in use by now, and kept: {len(found) - len(deleted)}" if len(deleted) < len(found) else ""
    print(f"deleted: {len(deleted)} folders, {sum(deleted):.2f} MiB{kept}")


def _agreed(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        print()
        return False


def _useless(out: Path) -> Iterator[tuple[Path, str]]:
    """The folders that hold no complete run, or one that another folder has, and why; none that a process works on."""
    known: dict[str, Path] = {}
    # Of two copies, the one that stays has the run's own name, by which its command finds it.
    for folder in sorted(_folders(out), key=lambda path: (not _NAMED.search(path.name), path)):
        if why := _of_no_use(folder, known):
            with suppress(Timeout), _lock(folder):
                yield folder, why


def _folders(out: Path) -> Collection[Path]:
    """The folders in `_PLACES`, each once, whatever links lead to it; no links, which may lead to the only copy."""
    places = (path for place in _PLACES for path in (out / place).glob("[!.]*/"))
    return {path.resolve(): path for path in places if not path.is_symlink()}.values()


def _of_no_use(folder: Path, known: dict[str, Path]) -> str:
    """Why a folder may go, given the complete runs by id so far; "": it may not, or it is no run's."""
    from fcl_bench.execution.folder import RunFolder

    if not any((folder / name).exists() for name in ("run.json", "run.log", "checkpoint")):
        return ""
    record, why = RunFolder(folder).checked()
    if record is not None:
        first = known.setdefault(record["run_id"], folder)
        return "" if first == folder else f"{_DOUBLE}{first}"
    # A file run.json in a folder of another name may be another program's.
    if not _NAMED.search(folder.name) or why.startswith(" is of another version"):
        return ""
    if (folder / "run.json").exists():
        return why.removeprefix(" is ")
    begun = (folder / "checkpoint").is_dir()
    return f"no complete run, it {'would go on where it stopped' if begun else 'failed or was stopped'}"


def _lock(folder: Path) -> FileLock:
    """The lock of the folder's run; taking it raises `Timeout` at once if a process works on that."""
    locks = folder.parent / ".locks"
    locks.mkdir(exist_ok=True)
    return FileLock(locks / f"{folder.name}.lock", timeout=0)


def _sign(folders: list[Path], options: argparse.Namespace) -> None:
    from fcl_bench.results.signing import sign

    for folder in folders:
        print(f"{folder.name}: signed by {sign(folder, options.key)}")


def _withdraw(_: list[Path], options: argparse.Namespace) -> None:
    from fcl_bench.execution.folder import run_folder
    from fcl_bench.execution.withdrawing import withdraw

    given = user_path("run", options.run)
    folder = (given if (given / "checkpoint").is_dir() else run_folder(options.run, options.out)).resolve()
    try:
        with _lock(folder):
            for client in withdraw(folder, user_path("FOLDER", options.sent)):
                print(f"client {client} is not in the model of {folder.name} any more")
    except Timeout as error:
        raise UserError(f"{folder.name} is going on", "Ctrl-C there, and its command again after this one") from error


def _verify(folders: list[Path], options: argparse.Namespace) -> None:
    from fcl_bench.results.signing import public_key

    wanted = public_key(options.signer) if options.signer else None
    failed = [folder.name for folder in folders if not _holds(folder, wanted)]
    if failed:
        raise UserError(f"not as they were written: {', '.join(failed)}", "the lines that begin with wrong say why")


def _holds(folder: Path, wanted: str | None) -> bool:
    """Print what is right and wrong of a run, a line each; return whether nothing is wrong.

    Args:
        wanted: the public key that has to have signed it; None: any, or none.
    """
    from fcl_bench.results.verifying import verify

    found = verify(folder)
    lines = [(f"{check.what} (from {check.source})", "; ".join(check.wrong)) for check in found.checks]
    if signature := _signature(folder, wanted):
        lines.append(signature)
    print(folder.name)
    for what, trouble in lines:
        print(printable(f"  wrong: {what}: {trouble}" if trouble else f"  right: {what}"))
    if found.settings is not None:
        for line in _origin(found.record, found.settings):
            print(printable(f"  {line}"))
    if found.unchecked:
        print(printable(f"  not recomputed, since nothing else in the folder tells them: {', '.join(found.unchecked)}"))
    return not any(trouble for _, trouble in lines)


def _signature(folder: Path, wanted: str | None) -> tuple[str, str] | None:
    """Return what a run's signature is, and what is wrong with it, "" for nothing; None where none is or has to be."""
    from fcl_bench.results.signing import signer

    try:
        found = signer(folder)
    except UserError as error:
        return "signature", str(error)
    if wanted in (None, found):
        return None if found is None else (f"signed by {found}", "")
    return "signature", f"{'nobody' if found is None else found} signed it, not {wanted}"


def _origin(record: Any, settings: Settings) -> list[str]:
    """Return whether known.yaml of the papers has a run's data and weights, a line each."""
    from fcl_bench.papers.matching import known_as, weights_of

    weights = weights_of(record, settings.backbone)
    hashes = [
        ("data", record["data_fingerprint"]),
        *([] if weights is None else [("weights", weights or "of no hash")]),
    ]
    known = [(kind, found, known_as(kind, found)) for kind, found in hashes]
    lines = [f"{kind} {found}: {f'known as {name}' if name else 'unknown'}" for kind, found, name in known]
    return lines + (["weights: none but what the seed draws"] if weights is None else [])
