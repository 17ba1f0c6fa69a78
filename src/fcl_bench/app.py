"""The command: compose, check, run, report; and what each way of ending looks like."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from typing import Any

from fcl_bench import __version__
from fcl_bench.command_line import SEE_HELP, composition_error, ordered
from fcl_bench.errors import UserError, first_line

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
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        if "-h" in arguments or "--help" in arguments:
            from fcl_bench.config import config_dir
            from fcl_bench.usage import usage

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
        _drop_output()
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
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from fcl_bench.config import config_dir

    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    def job(config: Any) -> None:
        codes.append(_job(config))

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
    failed = sum(code != DONE for code in codes)
    if failed and len(codes) > 1:
        print(f"fcl-bench: {failed} of {len(codes)} runs failed", file=sys.stderr)
    return next((code for code in (BUG, USER_ERROR) if code in codes), DONE)


def _job(config: Any) -> int:
    """One run of a single run or a sweep. Never raises but for an interrupt, so that a sweep goes on."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from fcl_bench.config import load_settings

    try:
        hydra_job = HydraConfig.get()
        if hydra_job.mode == RunMode.MULTIRUN:
            _say(f"\n── run {hydra_job.job.num}: {hydra_job.job.override_dirname or 'defaults'}")
        settings = load_settings(config)
        _log_to_terminal()
        if settings.scalars.preview:
            from fcl_bench.preview import preview

            preview(settings)
            sys.stdout.flush()
            return DONE
        from fcl_bench.report.screen import print_record
        from fcl_bench.run import run

        outcome = run(settings)
        if outcome.was_complete:
            _say("this run is complete already; its record follows (force=true repeats the run)")
        print_record(outcome.record, str(outcome.folder))
        sys.stdout.flush()
        return DONE
    except UserError as error:
        return _user_error(error)
    except BrokenPipeError:
        # Only the record's tables are left to print by then.
        _drop_output()
        return DONE
    except Exception as error:
        if (storage := _storage_error(error)) is not None:
            return _user_error(storage)
        traceback.print_exc()
        return BUG


def _storage_error(error: Exception) -> UserError | None:
    """A full disk and the like, which is not a bug; safetensors tells it only in the text of its own error."""
    if isinstance(error, OSError) and error.errno in _STORAGE:
        reason = f"{error.filename or 'a file'}: {error.strerror}"
    elif type(error).__name__ == "SafetensorError" and "os error" in str(error):
        reason = first_line(error)
    else:
        return None
    return UserError(f"writing failed, {reason}", "out=FOLDER and cache.dir=FOLDER with room to write")


def _say(text: str) -> None:
    """Print a line now, or go on without a reader."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _drop_output()


def _drop_output() -> None:
    """Whoever read our output (`| head`) has gone: go on without it, a sweep has more runs to do."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
