"""The command `fcl-bench`: compose with Hydra, carry out each job, print its result, return the exit code."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcl_bench import __version__
from fcl_bench.cli.command import BUG, DONE, USER_ERROR, interrupted, report_failure, run_command, storage_error
from fcl_bench.cli.overrides import COMMANDS, composed_as_typed, composition_error, ordered, without_folders
from fcl_bench.composition import FOLDERS, config_dir, current, groups, register
from fcl_bench.environment import spin_briefly
from fcl_bench.errors import UserError, first_line
from fcl_bench.tracking.console import log_to_terminal, printed_to, say, silence

if TYPE_CHECKING:
    from fcl_bench.config import Settings
    from fcl_bench.execution.run import Outcome
    from fcl_bench.sweeps.watch import Sweep


def main() -> int:
    """The console script `fcl-bench`; returns the exit code: 0 done, 2 wrong input, 130 interrupted, 1 a bug."""
    # With it, the same command would start anew.
    forced = any(re.match(r"\+*force=(?i:true)$", argument) for argument in sys.argv[1:])
    command = "the same command without force=true" if forced else "the same command"
    return run_command("fcl-bench", _work, f"{command} goes on where it stopped")


def _work() -> int:
    arguments = sys.argv[1:]
    spin_briefly()
    words = without_folders(arguments)
    if words and words[0] in COMMANDS:
        return import_module(COMMANDS[words[0]]).work(words[1:])
    if {"-h", "--help"} & set(words):
        return _help(words)
    if "--version" in arguments:
        print(f"fcl-bench {__version__}")
        return DONE
    if not any(argument.startswith("-") for argument in words):
        return carry_out(lambda: composed_as_typed(ordered(words)), []).code
    return _hydra(ordered(arguments))


def _help(arguments: list[str]) -> int:
    """Print the keys of the choices that were typed (`method=stsa_e --help`), or the general help if none was."""
    from fcl_bench.cli.show import about, usage

    typed = [argument.partition("=") for argument in current(arguments)]
    chosen = [about(group, choice) for group, equals, choice in typed if equals and group in groups()]
    if not chosen:
        print(usage(), end="")
        return DONE
    print("\n\n".join(chosen))
    print("\n`fcl-bench --help` lists all groups and the top-level keys.")
    return DONE


def _hydra(arguments: list[str]) -> int:
    """Have Hydra do what its options say; return the worst job's exit code."""
    # With it, Hydra raises its errors instead of printing its own report and exiting with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with no_collection():
        import hydra
        import yaml
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

    register(arguments)
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    def each_job(config: Any) -> None:
        codes.append(job(config))

    sys.argv[1:] = arguments
    multirun = bool({"-m", "--multirun"} & set(arguments))
    if multirun and any(re.match(r"\+*transport=.*\branks\b", argument) for argument in arguments):
        raise UserError("-m with transport=ranks: every rank would be a sweep of its own", "one torchrun per run")
    around: AbstractContextManager[Any] = nullcontext()
    if multirun:
        from fcl_bench.sweeps.watch import sweeping  # a single run needs nothing of it

        around = sweeping()
    with around as sweep:
        try:
            each_job()
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise composition_error(error, arguments) from error
        except (TypeError, ValueError, OSError) as error:
            # Before the first job, Hydra fails on what was typed (method=[1]).
            if codes or isinstance(error, BrokenPipeError):
                raise
            raise storage_error(error) or composition_error(error, arguments) from error
        except RuntimeError as error:
            # A launcher raises this if its worker was killed; the reports say which jobs are not done.
            if sweep is None or not sweep.began:
                raise
            # submitit names the job on its first line, and gives the cluster's message on the second.
            reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
            say(f"fcl-bench: the launcher stopped: {reason}", sys.stderr)
            return BUG
        if sweep is not None and sweep.began:
            # A job in another process without an exit code has died or never started.
            ended = [report.code for report in sweep.reports() if not codes or report.code is not None]
            codes += [BUG if code is None else code for code in ended]
    return next((code for code in (BUG, USER_ERROR) if code in codes), DONE)


#: The remedy that is suggested when nothing can be written.
_ROOM = "out=FOLDER and cache.dir=FOLDER with room to write"


@dataclass
class Ended:
    """How a run ended: the exit code, the reason of a failure in one line, and the outcome of a complete run."""

    code: int = DONE
    reason: str = ""
    outcome: Outcome | None = None


def job(config: Any) -> int:
    """Carry out what Hydra composed; return the exit code. It raises only on an interrupt, so that a sweep goes on.

    Args:
        config: of the run; in a sweep, of the whole sweep.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra_job = HydraConfig.get()
    if hydra_job.mode != RunMode.MULTIRUN:
        return carry_out(lambda: config, []).code
    from fcl_bench.sweeps.watch import current_sweep

    sweep = current_sweep()
    number, overrides = sweep.job if sweep else (hydra_job.job.num, hydra_job.overrides.task)
    folder = sweep.folder if sweep else Path(str(hydra_job.sweep.dir)).absolute()
    if sweep is None:  # a worker has to be told where the choices are
        FOLDERS[:] = [Path(source.path) for source in hydra_job.runtime.config_sources if source.schema == "file"]
    try:
        return _job_of_sweep(config, folder, number, list(overrides), sweep)
    except OSError as error:
        # The job's report cannot be written, and what is on disk still says that it runs.
        return report_failure("fcl-bench", storage_error(error, _ROOM) or UserError(first_line(error), _ROOM))[0]


def _job_of_sweep(whole: Any, folder: Path, number: int, overrides: list[str], sweep: Sweep | None) -> int:
    """Carry out one job with a report for the parent process, and with its share of the machine if it shares one."""
    from omegaconf import OmegaConf

    from fcl_bench.data.shared import start_sharing
    from fcl_bench.sweeps.jobs import JobReport, output_path, reported
    from fcl_bench.sweeps.workers import take_gpu

    def composing() -> Any:
        config = composed_as_typed(overrides)
        OmegaConf.copy_cache(whole, config)  # `now` is the same for all jobs
        if sweep is None:
            take_gpu(folder, str(config.device))
        return config

    report = JobReport(number, overrides)
    output = output_path(folder, number)
    start_sharing()
    with reported(folder, report):
        with printed_to(output) if sweep is None or sweep.folds else nullcontext():
            ended = carry_out(composing, report.warnings)
        report.code, report.reason = ended.code, ended.reason
        if (outcome := ended.outcome) is not None:
            report.run, report.was_complete = str(outcome.folder), outcome.was_complete
            metrics, upload = outcome.record["metrics"], outcome.record["communication"]["up_max_bytes"]
            report.result = {"A_avg": metrics["A_avg"], "A_T": metrics["A_T"], "up_max_mib": upload / 2**20}
            report.gates = sorted({found["gate"] for found in outcome.record["gates"]})
    return ended.code


def carry_out(composing: Callable[[], Any], warned: list[str]) -> Ended:
    """Compose, check and run, and print the result; the text of each warning is added to `warned`."""
    from fcl_bench.config import load_settings
    from fcl_bench.tracking import load_tracking

    ended, complete = Ended(), False  # whether all that is left is to print the result
    try:
        config = composing()
        tracking = load_tracking(config)
        with no_collection():
            settings = load_settings(config)
            from fcl_bench.execution.run import run
        if settings.transport.follows:
            return Ended(_follow(settings))
        log_to_terminal("fcl-bench", warned)
        if settings.scalars.preview:
            from fcl_bench.execution.preview import preview

            complete = True  # it prints last
            preview(settings)
        else:
            ended.outcome = outcome = run(settings, tracking)
            complete = True
            from fcl_bench.execution.screen import print_record

            if outcome.was_complete:
                say("this run is complete already; its record follows (force=true repeats the run)")
            print_record(outcome.record, str(outcome.folder), settings.scalars.details)
        sys.stdout.flush()
    except Exception as error:
        explained = storage_error(error, _ROOM) or _out_of_time(error)
        ended.code, ended.reason = report_failure("fcl-bench", explained or error, complete)
    return ended


def _follow(settings: Settings) -> int:
    """Work as a process that has clients only; the server's process does all printing and writing."""
    from fcl_bench.execution.serve import serve

    if settings.scalars.preview:
        return DONE
    silence()
    try:
        serve(settings)
    except UserError:
        if settings.transport.speaks:
            raise
        return USER_ERROR
    except KeyboardInterrupt as error:
        return interrupted(error)
    return DONE


@contextmanager
def no_collection() -> Iterator[None]:
    """Switch garbage collection off in the block, which imports: it makes a million objects, and all of them stay.

    The objects of the first such imports are frozen, so that no later collection (such as at exit) looks at them.
    """
    first = "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
        gc.enable()


def _out_of_time(error: Exception) -> UserError | None:
    """Explain submitit's error in a job that meets its time limit more often than it may be queued again."""
    if type(error).__name__ != "UncompletedJobError":
        return None
    return UserError(
        f"the job met its time limit: {first_line(error)}",
        "a larger hydra.launcher.timeout_min; the same command goes on after the last complete task",
    )
