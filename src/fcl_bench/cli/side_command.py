"""What the commands beside `fcl-bench` share: a parser that complains in one line, and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from typing import ClassVar, NoReturn

from fcl_bench.cli.app import BUG, DONE, INTERRUPTED, USER_ERROR
from fcl_bench.errors import UserError


class Parser(argparse.ArgumentParser):
    """Complains in one line, as the rest of the project does.

    Attributes:
        lists: what --help lists, for messages.
    """

    lists: ClassVar[str] = "options"

    def error(self, message: str) -> NoReturn:
        raise UserError(message, f"{self.prog.split()[0]} --help lists the {self.lists}")


def run_command(name: str, work: Callable[[], int], when_interrupted: str = "") -> int:
    """The exit code of `work`: its own, 2 for wrong input, 130 if interrupted, 1 for a bug.

    Args:
        name: of the command, before its messages.
        work: all of it, its arguments included.
        when_interrupted: what to say then, in parentheses.
    """
    try:
        return work()
    except UserError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"{name}: interrupted{f' ({when_interrupted})' if when_interrupted else ''}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output (`| head`) has gone; what is to be written is written by then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception:
        traceback.print_exc()
        return BUG
