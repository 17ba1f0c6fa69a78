"""The command: compose, check, run, report; and what each way of ending looks like."""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcl_bench import __version__
from fcl_bench.cli.garbage import first_job_begins, resting_collector
from fcl_bench.cli.overrides import SEE_HELP, composition_error, ordered
from fcl_bench.errors import UserError, first_line
from fcl_bench.sweep.workers import SPIN
from fcl_bench.tracking.console import drop_output, output_to, say

DONE, BUG, USER_ERROR, INTERRUPTED = 0, 1, 2, 130

#: The system's words for storage that is full or closed, whatever library met it.
_STORAGE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST),
}
#: Name of the log handlers that write to the terminal; each job sets its own.
_TERMINAL = "terminal"


def main() -> int:
    """The console script `fcl-bench`; returns the exit code: 0 done, 2 wrong input, 130 interrupted, 1 a bug."""
    arguments = sys.argv[1:]
    # Threads that wait by spinning take the cores from each other: two default runs at once on two cores took 110 s
    # each, and 9 s each with this short spin, while a run alone is no slower (it is with OMP_WAIT_POLICY=PASSIVE, which
    # never spins). GNU OpenMP, which torch brings on Linux, reads it when torch is imported, and that is yet to come.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)
        # The threads of SciPy's OpenBLAS, likewise: 2^20 cycles instead of 2^26 until they sleep. A FedRAN run alone
        # took 6 % less with it, and 15 % less processor time.
        os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")
    try:
        if "-h" in arguments or "--help" in arguments:
            from fcl_bench.cli.help import usage
            from fcl_bench.config import config_dir

            print(usage(config_dir()), end="")
            return DONE
        if "--version" in arguments:
            print(f"fcl-bench {__version__}")
            return DONE
        sys.argv[1:] = ordered(arguments)
        return _hydra()
    except UserError as error:
        return _user_error(error)
    except KeyboardInterrupt:
        print("fcl-bench: interrupted (the same command goes on where it stopped)", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return DONE
    except Exception:
        traceback.print_exc()
        return BUG


def _user_error(error: UserError) -> int:
    print(f"fcl-bench: error: {error}", file=sys.stderr)
    return USER_ERROR


def _hydra() -> int:
    """Compose with Hydra and run each job; the worst job's exit code."""
    # Hydra then raises what went wrong instead of printing its own report and exiting with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with resting_collector():
        import hydra
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        from fcl_bench.config import config_dir
        from fcl_bench.sweep.launchers import require_launcher
        from fcl_bench.sweep.watch import CALLBACK, sweeping

    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    def job(config: Any) -> None:
        codes.append(_job(config))

    if {"-m", "--multirun"} & set(sys.argv):
        require_launcher(sys.argv[1:])
        sys.argv.append(CALLBACK)
    with sweeping() as sweep:
        try:
            job()
        except (HydraException, OmegaConfBaseException) as error:
            raise composition_error(error) from error
        except (TypeError, ValueError, OSError) as error:
            # Before the first job this is Hydra failing on what was typed (method=[1], an out that can't be made).
            if codes or isinstance(error, BrokenPipeError):
                raise
            if isinstance(error, OSError):
                raise _storage_error(error) or error from error
            raise UserError(f"the configuration cannot be composed: {first_line(error)}", SEE_HELP) from error
        except RuntimeError as error:
            # A launcher whose worker was killed says so; which jobs that leaves undone is in their reports.
            if not sweep.began:
                raise
            print(f"fcl-bench: the launcher stopped: {first_line(error)}", file=sys.stderr)
            return BUG
        if sweep.began and not codes:  # the jobs ran in other processes
            codes = [BUG if report.code is None else report.code for report in sweep.reports()]
    return next((code for code in (BUG, USER_ERROR) if code in codes), DONE)


@dataclass
class _End:
    """How one run ended: its exit code, of a failure the reason in one line, and the run's folder."""

    code: int
    reason: str = ""
    run: str = ""
    was_complete: bool = False


def _job(config: Any) -> int:
    """One run of a single run or a sweep. Never raises but for an interrupt, so that a sweep goes on."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra_job = HydraConfig.get()
    if hydra_job.mode != RunMode.MULTIRUN:
        return _carry_out(config).code
    try:
        return _job_of_sweep(config, hydra_job)
    except OSError as error:
        # Its report cannot be written.
        _user_error(_storage_error(error) or UserError(first_line(error), "out=FOLDER with room to write"))
        return USER_ERROR


def _job_of_sweep(config: Any, hydra_job: Any) -> int:
    """One job, with a report for the parent process; where it shares the machine, with its share of it."""
    from fcl_bench.sweep.jobs import DONE as JOB_DONE
    from fcl_bench.sweep.jobs import FAILED, INTERRUPTED, JobReport, output_path, write_report
    from fcl_bench.sweep.watch import current_sweep
    from fcl_bench.sweep.workers import take_gpu

    folder = Path(str(hydra_job.sweep.dir)).absolute()
    report = JobReport(hydra_job.job.num, list(hydra_job.overrides.task))
    write_report(folder, report)
    begin = time.perf_counter()
    try:
        if (sweep := current_sweep()) is not None:
            say(f"\n── {sweep.header(report.number)}: {hydra_job.job.override_dirname or 'defaults'}")
            end = _carry_out(config)
        else:
            take_gpu(folder, str(config.device))
            with output_to(output_path(folder, report.number)):
                end = _carry_out(config)
    except BaseException:
        report.status = INTERRUPTED
        raise
    else:
        report.status = JOB_DONE if end.code == DONE else FAILED
        report.code, report.reason, report.run, report.was_complete = end.code, end.reason, end.run, end.was_complete
        return end.code
    finally:
        report.seconds = time.perf_counter() - begin
        write_report(folder, report)


def _carry_out(config: Any) -> _End:
    """Check and run what was composed, and print what came out."""
    from fcl_bench.config import load_settings
    from fcl_bench.tracking.base import load_tracking

    end = _End(DONE)
    try:
        tracking = load_tracking(config)
        with resting_collector():
            settings = load_settings(config)
        _log_to_terminal()
        if settings.scalars.preview:
            from fcl_bench.runs.preview import preview

            preview(settings)
            sys.stdout.flush()
            return end
        with resting_collector():
            from fcl_bench.runs.run import run
            from fcl_bench.runs.screen import print_record
        first_job_begins()

        outcome = run(settings, tracking)
        end = _End(DONE, run=str(outcome.folder), was_complete=outcome.was_complete)
        if outcome.was_complete:
            say("this run is complete already; its record follows (force=true repeats the run)")
        print_record(outcome.record, str(outcome.folder))
        sys.stdout.flush()
        return end
    except UserError as error:
        return _End(_user_error(error), str(error))
    except BrokenPipeError:
        # Only the record's tables are left to print by then.
        drop_output()
        return end
    except Exception as error:
        if (storage := _storage_error(error)) is not None:
            return _End(_user_error(storage), str(storage))
        traceback.print_exc()
        return _End(BUG, f"{type(error).__name__}: {first_line(error)}")


def _storage_error(error: Exception) -> UserError | None:
    """A full disk and the like, which is not a bug; safetensors tells it only in the text of its own error."""
    if isinstance(error, OSError) and error.errno in _STORAGE:
        reason = f"{error.filename or 'a file'}: {error.strerror}"
    elif type(error).__name__ == "SafetensorError" and "os error" in str(error):
        reason = first_line(error)
    else:
        return None
    return UserError(f"writing failed, {reason}", "out=FOLDER and cache.dir=FOLDER with room to write")


def _log_to_terminal() -> None:
    """The package's notes to stdout, its warnings to stderr."""
    package = logging.getLogger("fcl_bench")
    package.setLevel(logging.DEBUG)
    notes, warnings = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
    notes.setLevel(logging.INFO)
    notes.addFilter(lambda record: record.levelno < logging.WARNING)
    warnings.setLevel(logging.WARNING)
    for old in [handler for handler in package.handlers if handler.name == _TERMINAL]:
        package.removeHandler(old)
    for handler in (notes, warnings):
        handler.name = _TERMINAL
        handler.setFormatter(logging.Formatter("fcl-bench: %(message)s"))
        package.addHandler(handler)
