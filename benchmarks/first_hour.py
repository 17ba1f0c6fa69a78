"""A newcomer's first hour: the commands of README and the quick start, run verbatim, with the time of each task.

Every task is one or more commands in an empty folder. It must end with the exit code and the words that are named here,
and leaves its files to the tasks after it. Seconds are the clock's; processor seconds are those that the commands used,
which depend less on what else the machine does.

    python -m benchmarks first_hour                                  # all tasks with this environment
    python -m benchmarks first_hour --setup                          # clones and installs first, as README says
    python -m benchmarks first_hour --setup --only "set up"          # that task alone
    python -m benchmarks first_hour --markdown outputs/bench/first_hour.md
    python -m benchmarks first_hour --setup --docs                   # and writes the quick start's table anew
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from report import machine, table, write

REPOSITORY = Path(__file__).resolve().parents[1]
#: The page with the table of processor seconds, and what stands above it.
PAGE = REPOSITORY / "docs" / "tutorials" / "quickstart.md"
HEADING = "| task | its commands are on | processor seconds |\n|---|---|---:|\n"
#: The pages that a newcomer opens, in this order, and their names in the table.
PAGES = {
    "README.md": "README",
    "docs/tutorials/quickstart.md": "this page",
    "docs/tutorials/paper_table.md": "[a table for your paper](paper_table.md)",
    "docs/how-to/adding.md": "[adding](../how-to/adding.md)",
}
#: Seconds after which a command is given up.
PATIENCE = 3600


@dataclass(frozen=True)
class Task:
    """One thing that a newcomer wants.

    Attributes:
        name: what, in the table.
        commands: as typed; {run} is the run folder that an earlier command printed.
        says: a regular expression that the last command's output matches.
        code: the last command's exit code. All before it end with 0.
        writes: files that the reader writes first, name -> content.
        interrupted: files (a glob) at whose appearance the first command gets a Ctrl-C; it ends with 130 then.
    """

    name: str
    commands: tuple[str, ...]
    says: str
    code: int = 0
    writes: Mapping[str, str] = field(default_factory=dict)
    interrupted: str = ""


def block(page: str, words: str) -> str:
    """The indented or fenced block of a page that has these words in it, as a reader copies it."""
    text = (REPOSITORY / page).read_text()
    fenced = re.findall(r"^```\w+\n(.*?)^```", text, flags=re.M | re.S)
    indented = [textwrap.dedent(found) for found in re.findall(r"(?:^ {4}.*\n(?:[ \t]*\n)*)+", text, flags=re.M)]
    return next(found for found in (*fenced, *indented) if words in found)


FEATURES = block("docs/tutorials/paper_table.md", "np.savez")
TRAINED = "fcl-bench method=fedavg backbone=tiny"
SETUP = Task("set up, and a first run", ("git clone --quiet {repository} .", "make run"), "run folder: ")
TASKS = (
    Task("a run of another method", ("fcl-bench method=stsa data=digits",), "run folder: "),
    Task(
        "go on after a Ctrl-C",
        (TRAINED, TRAINED),
        r"going on after task \d+ of \d+",
        interrupted="outputs/runs/fedavg-*/checkpoint/state.json",
    ),
    Task(
        "a sweep of 18 runs", ("fcl-bench -m method=stsa,afl,fedran beta=0.1,1 seed=0,1,2",), r"fcl-tables --sweep \w+"
    ),
    Task(
        "a sweep that trains on features",
        ("fcl-bench -m method=fedavg method.trains=features method.training.rounds=10 beta=0.1,1 seed=0,1,2",),
        r"fcl-tables --sweep \w+",
    ),
    Task("the table of the sweep", ("fcl-tables --latest",), r"written: .*summary\.\* "),
    Task("figures, and a page", ("fcl-tables --figures --html",), r"written: .*\bhtml\b"),
    Task("reference results beside ours", ("fcl-tables --reference",), "reference"),
    Task("a paper's table in miniature", ("fcl-bench -m experiment=fedran_table3 profile=quick",), "fcl-tables --"),
    Task("printed numbers beside ours", ("fcl-tables --paper fedran",), "Table 3"),
    Task(
        "own features",
        ("python my_features.py", "fcl-bench data=features data.path=my_features.npz"),
        "run folder: ",
        writes={"my_features.py": FEATURES},
    ),
    Task(
        "own features to a paper's table",
        (
            "fcl-bench -m data=features data.path=my_features.npz method=fedncm,stsa,fedran method.M=512 clients=10"
            " predictions=true seed=0,1,2",
            "fcl-tables --where data=features --metrics A_avg,A_T,forgetting,up_max_mib --format tex --name paper",
        ),
        r"written: .*paper\.\* \(tex, bib",
    ),
    Task(
        "own method",
        (
            "fcl-bench new method my_method",
            "PYTHONPATH=my_method:$PYTHONPATH fcl-bench --config-dir my_method/my_method/conf method=my_method"
            " data=digits",
        ),
        "run folder: outputs/runs/my_method-",
    ),
    Task("a saved model's predictions", ("fcl-bench predict {run} > predictions.csv",), r"accuracy: \d\d\.\d+ %"),
    Task(
        "the same in Python",
        ("python first.py",),
        r"\d\d\.\d+ \[",
        writes={"first.py": block("README.md", "import fcl_bench")},
    ),
    Task("what a method's keys mean", ("fcl-bench show method=stsa",), "gamma"),
    Task("a typing error", ("fcl-bench method=stsa clints=5",), "did you mean clients", code=2),
)


def opened(task: Task) -> list[str]:
    """The pages that a newcomer opens for a task: for each command the first of `PAGES` that has it.

    Raises ValueError for a command that none has. A command that is wrong on purpose stands nowhere.
    """
    texts = {page: (REPOSITORY / page).read_text() for page in PAGES}
    found = [page for page, text in texts.items() if any(_fenced_like(text, own) for own in task.writes.values())]
    for command in task.commands:
        told = command.replace("{run}", "RUN").replace("{repository} .", "").partition(" > ")[0]
        told = told.replace(":$PYTHONPATH ", " ")
        if task.code or told.startswith(("python ", "git clone")):
            continue
        pages = [page for page, text in texts.items() if told in text]
        if not pages:
            raise ValueError(f"{task.name}: no page has {told}")
        found += pages[:1]
    return [page for page in PAGES if page in found]


def _fenced_like(text: str, content: str) -> bool:
    """Whether a page has this file to copy, with any indentation."""
    return textwrap.dedent(content).strip() in text


def carried_out(task: Task, folder: Path, environment: dict[str, str], known: dict[str, str]) -> tuple[float, float]:
    """Seconds and processor seconds of a task. Raises RuntimeError where it does not go as it should."""
    for name, content in task.writes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    said = ""
    for number, command in enumerate(task.commands):
        typed = re.sub(r"\{(\w+)\}", lambda found: known[found[1]], command)
        is_cut = bool(task.interrupted) and number == 0
        with tempfile.TemporaryFile("w+") as log:
            # A shell that gets the signal, too, ends by it, whatever the command's own code is.
            line = f"exec {typed}" if is_cut else typed
            process = subprocess.Popen(
                line,
                shell=True,
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # In the background of a script SIGINT is ignored, which child processes inherit.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
            try:
                code = _code(process, folder, task.interrupted if is_cut else "")
            finally:
                if process.poll() is None:  # Ctrl-C reaches this script only
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            log.seek(0)
            said = log.read()
        wanted = 130 if is_cut else task.code if number == len(task.commands) - 1 else 0
        if code != wanted:
            ended = f"is not done after {PATIENCE} s" if code is None else f"ended with {code}, not {wanted}"
            raise RuntimeError(f"{task.name}: {typed} {ended}:\n{said[-2000:]}")
    seconds, now = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if not re.search(task.says, said):
        raise RuntimeError(f"{task.name}: nothing like {task.says!r} in\n{said[-2000:]}")
    if found := re.search(r"run folder: (\S*stsa-digits\S*)", said):
        known["run"] = found[1]
    return seconds, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def _code(process: subprocess.Popen[bytes], folder: Path, interrupted: str) -> int | None:
    """The exit code of a command, which gets a Ctrl-C once there are files like these; None where it is given up."""
    end = time.monotonic() + PATIENCE
    if interrupted:
        while process.poll() is None and not list(folder.glob(interrupted)) and time.monotonic() < end:
            time.sleep(0.05)
        if process.returncode is None:  # else it ended by itself
            os.killpg(process.pid, signal.SIGINT)
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def renewed(page: str, used: Mapping[str, float]) -> str:
    """The page with these processor seconds in its table, which keeps the rows of tasks that are not measured.

    Args:
        page: the text, with the table below `HEADING`.
        used: task -> processor seconds.
    """
    above, below = page.split(HEADING)
    lines = re.match(r"(\|.*\n)*", below)[0]
    rows = dict(re.findall(r"^\| (.*) \| .* \| ([\d.]+) \|$", lines, flags=re.M))
    rows |= {task: f"{seconds:.1f}" for task, seconds in used.items()}
    order = [task for task in (SETUP, *TASKS) if task.name in rows]
    together = sum(float(rows[task.name]) for task in order)
    pages = {task.name: ", ".join(PAGES[page] for page in opened(task)) or "no page" for task in order}
    table_rows = [f"| {name} | {pages[name]} | {rows[name]} |" for name in pages]
    table_rows.append(f"| together | {len(PAGES)} pages | {together:.0f} |")
    return above + HEADING + "\n".join(table_rows) + "\n" + below[len(lines) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="clone and install first: gigabytes, and minutes")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="tasks with these words in their name; others may need earlier ones"
    )
    parser.add_argument("--markdown", type=Path, help="write the table there, too; the numbers beside it as .json")
    parser.add_argument("--docs", action="store_true", help=f"write the numbers into {PAGE.relative_to(REPOSITORY)}")
    chosen = parser.parse_args()
    known = {"repository": str(REPOSITORY)}
    runs = []
    with tempfile.TemporaryDirectory(prefix="fcl-bench-hour-") as place:
        folder = Path(place)
        own = folder / ".venv/bin" if chosen.setup else Path(sys.executable).parent
        environment = {**os.environ, "PATH": f"{own}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}
        environment.setdefault("PYTHONPATH", "" if chosen.setup else str(REPOSITORY / "src"))
        for task in (task for task in (*((SETUP,) if chosen.setup else ()), *TASKS) if chosen.only in task.name):
            seconds, used = carried_out(task, folder, environment, known)
            print(f"{task.name}: {seconds:.1f} s, processor {used:.1f} s", file=sys.stderr, flush=True)
            runs.append({"task": task.name, "commands": len(task.commands), "seconds": seconds, "used": used})
    header = ["task", "commands", "seconds", "processor seconds"]
    rows = [[run["task"], str(run["commands"]), f"{run['seconds']:.1f}", f"{run['used']:.1f}"] for run in runs]
    sums = [sum(run[key] for run in runs) for key in ("commands", "seconds", "used")]
    rows.append(["together", str(sums[0]), f"{sums[1]:.0f}", f"{sums[2]:.0f}"])
    print(machine(), text := table(header, rows, words=1), sep="\n\n")
    write(chosen.markdown, runs, text)
    if chosen.docs:
        PAGE.write_text(renewed(PAGE.read_text(), {run["task"]: run["used"] for run in runs}))


if __name__ == "__main__":
    main()
