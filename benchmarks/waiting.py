"""What a user waits for around runs, in processor seconds and as a multiple of `import torch`.

    python -m benchmarks waiting                               # all rows
    python -m benchmarks waiting --only tables --runs 2000     # one of them
    python -m benchmarks waiting --against ../other/src        # by turns with another checkout

`ROWS` says what they are; the runs that are collected are copies of one, with other seeds and settings. The table of
docs/results/benchmarks.md is of benchmarks/measured/waiting.json (--out benchmarks/measured).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import machine, table_of, write

from fcl_bench import files as json_files
from fcl_bench.files import file_checksum

JOBS = ("-m", "method=afl,stsa,fedran,fedncm,fedlda", "data=digits", "seed=range(100)")
#: Jobs of a sweep that is typed again when all of them are finished.
AGAIN = 20
COMPOSING = (
    "import time; from fcl_bench.composition import composed; composed(['method=afl', 'seed=0'])\n"
    "begin = time.process_time()\n"
    "for seed in range(50): composed(['method=afl', f'seed={seed}', 'clients=7'])\n"
    "print((time.process_time() - begin) / 50)"
)
COLLECT = (
    "import sys, time; from pathlib import Path; from fcl_bench.results.collect import collect\n"
    "begin = time.process_time(); collect(Path(sys.argv[1])); print(time.process_time() - begin)"
)


def used(arguments: list[str], source: Path) -> tuple[float, str]:
    """Processor seconds of a Python process, which has to end well, and its last line."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environment, check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return seconds, (done.stdout.splitlines() or [""])[-1]


def until_begun(arguments: tuple[str, ...], source: Path, out: Path) -> float:
    """Processor seconds of a sweep's own process until its first job has a report; it is interrupted then."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fcl_bench", *arguments, f"out={out}"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(out.glob("sweeps/*/jobs/*.json")):
        time.sleep(0.02)
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    process.send_signal(signal.SIGINT)
    process.wait()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def copies(run: Path, runs: Path, number: int) -> None:
    """Folders of runs like this one, with other seeds, betas and numbers of clients."""
    record = json.loads((run / "run.json").read_text())
    config = (run / "config.yaml").read_text()
    for copy in range(number):
        folder = runs / f"afl-digits-pixels-{copy:012x}"
        folder.mkdir(parents=True)
        for name in record["files"].keys() - {"config.yaml"}:
            os.link(run / name, folder / name)
        keys = {"seed": copy % 5, "beta": (0.1, 0.5, 1, 2)[copy // 5 % 4], "clients": copy // 20 + 1}
        text = config
        for key, value in keys.items():
            text = re.sub(rf"(?m)^{key}: .*$", f"{key}: {value}", text)
        (folder / "config.yaml").write_text(text)
        files = {**record["files"], "config.yaml": file_checksum(folder / "config.yaml")}
        json_files.write_json(folder / "run.json", {**record, **keys, "run_id": f"{copy:012x}", "files": files})


def measured(row: str, source: Path, place: Path) -> float:
    """Processor seconds of one row, with the code in `source`."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        match row:
            case "import torch":
                return used(["-c", "import torch"], source)[0]
            case "composing":
                return float(used(["-c", COMPOSING], source)[1])
            case "first job":
                return until_begun(JOBS, source, Path(folder))
            case "launched":
                return until_begun((*JOBS, "hydra/launcher=parallel", "hydra.launcher.n_jobs=2"), source, Path(folder))
            case "afl":
                return used(["-m", "fcl_bench", "method=afl", "data=digits", f"out={folder}"], source)[0]
            case "finished job":
                sweep = ["-m", "fcl_bench", "-m", "method=afl", "data=digits", f"out={folder}"]
                used([*sweep, f"seed=range({AGAIN})"], source)
                one, all_of_them = (used([*sweep, f"seed=range({jobs})"], source)[0] for jobs in (1, AGAIN))
                return (all_of_them - one) / (AGAIN - 1)
            case "papers":
                return used(["-m", "fcl_bench.cli.tables", "--paper", "all", "--out", folder], source)[0]
            case "tables":
                return used(["-m", "fcl_bench.cli.tables", "--out", str(place / "many")], source)[0]
    if row == "collect":
        (place / "many" / "runs" / ".index.json").unlink(missing_ok=True)
    else:
        used(["-c", COLLECT, str(place / "many" / "runs")], source)
    return float(used(["-c", COLLECT, str(place / "many" / "runs")], source)[1])


#: Row -> what it is, for tables.
ROWS = {
    "import torch": "`import torch`",
    "composing": "composing a further job of a sweep",
    "first job": "a sweep of 500 jobs until the first begins",
    "launched": "the same with two workers, parent process alone",
    "finished job": "a finished job of a sweep that goes on",
    "afl": "AFL on digits, the whole command",
    "collect": "reading {runs:,} runs for the first time",
    "collect again": "reading {runs:,} runs again",
    "tables": "`fcl-tables` of {runs:,} runs",
    "papers": "`fcl-tables --paper all` without runs",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="LIST", help="rows with commas between them")
    parser.add_argument("--runs", type=int, default=10_000, help="folders to collect")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path, metavar="SRC", help="another checkout's src, measured by turns")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks"))
    given = parser.parse_args()
    wanted = given.only.split(",") if given.only else list(ROWS)
    if unknown := set(wanted) - ROWS.keys():
        parser.error(f"--only: {', '.join(sorted(unknown))} is no row (the rows are {', '.join(ROWS)})")
    chosen = [row for row in ROWS if row in ("import torch", *wanted)]
    sources = [Path(__file__).parents[1] / "src", *([given.against.absolute()] if given.against else [])]
    found: dict[tuple[str, Path], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if any(row.startswith("collect") or row == "tables" for row in chosen):
            used(["-m", "fcl_bench", "method=afl", "data=digits", f"out={place}"], sources[0])
            copies(next(place.glob("runs/*/run.json")).parent, place / "many" / "runs", given.runs)
        for _ in range(given.repeats):
            for row in chosen:
                for source in sources:
                    found.setdefault((row, source), []).append(measured(row, source, place))
    unit = statistics.median(found["import torch", sources[0]])
    rows = []
    for row in chosen:
        told = {"what": ROWS[row].format(runs=given.runs)}
        for name, source in zip(("", "there: "), sources, strict=False):
            seconds = found[row, source]
            told |= {f"{name}processor seconds": seconds, f"{name}of `import torch`": statistics.median(seconds) / unit}
        rows.append(told)
    write(given.out / "waiting.json", rows)
    print(machine(), table_of(rows), f"written: {given.out / 'waiting.json'}", sep="\n\n")


if __name__ == "__main__":
    main()
