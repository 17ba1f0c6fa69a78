"""What the three commands share: how each way of ending looks, and a parser that complains in one line."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from typing import ClassVar, NoReturn

from fcl_bench.errors import UserError, first_line
from fcl_bench.tracking.console import drop_output

DONE, BUG, USER_ERROR, INTERRUPTED = 0, 1, 2, 130


def run_command(name: str, work: Callable[[], int], when_interrupted: str = "") -> int:
    """The exit code of `work`: its own, 2 for wrong input, 130 if interrupted, 1 for a bug.

    Args:
        name: of the command, before its messages.
        work: all of it, its arguments included.
        when_interrupted: what to say then, in parentheses.
    """
    try:
        code = work()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"{name}: interrupted{f' ({when_interrupted})' if when_interrupted else ''}", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return report_failure(name, error)[0]


def report_failure(name: str, error: Exception) -> tuple[int, str]:
    """Tell the user of the command `name` what went wrong; returns the exit code and the reason in one line."""
    if isinstance(error, BrokenPipeError):
        # Whoever read our output (`| head`) has gone; what is to be written is written by then.
        drop_output()
        return DONE, ""
    if isinstance(error, UserError):
        print(f"{name}: error: {error}", file=sys.stderr)
        return USER_ERROR, str(error)
    traceback.print_exception(error)
    return BUG, f"{type(error).__name__}: {first_line(error)}"


class Parser(argparse.ArgumentParser):
    """Complains in one line, as the rest of the project does.

    Attributes:
        lists: what --help lists, for messages.
    """

    lists: ClassVar[str] = "options"

    def error(self, message: str) -> NoReturn:
        raise UserError(message, f"{self.prog.split()[0]} --help lists the {self.lists}")
