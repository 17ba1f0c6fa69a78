"""What a node tells the server when it sends nothing: a number, which stands for a public sentence.

The whole reason, with paths, names and tracebacks, goes to the node's own log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fcl_bench.errors import UserError

NOT_SIGNED, RUN_FORBIDDEN, TOO_FEW, KEEPS_SAMPLES, SPENT, PEER, WITHDRAWN = 10, 11, 12, 13, 14, 15, 16
DOES_NOT_FIT, STATE_LOST, TURN_FAILED, INSIDE = 20, 21, 22, 30

SENTENCES = {
    NOT_SIGNED: "its policy takes requests of another key (transport.key) only, each once and in its time",
    RUN_FORBIDDEN: "its policy forbids the method, the data or a knob of this run",
    TOO_FEW: "its policy forbids this upload, which holds single samples, or sums over too few",
    KEEPS_SAMPLES: "its policy lets no client keep samples of earlier tasks",
    SPENT: "no more leaves the site, by its policy",
    PEER: "public keys are not signed by the node whose client they are said to be of",
    WITHDRAWN: "it has withdrawn from this run (fcl-bench runs withdraw)",
    DOES_NOT_FIT: "its data or its own keys do not fit this run",
    STATE_LOST: "it lacks a state from which the last checkpoint goes on",
    TURN_FAILED: "its turn failed",
    INSIDE: "an error in its program",
}


class Refusal(UserError):
    """A `UserError` at a node, with the number that goes to the server in its place."""

    def __init__(self, code: int, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.code = code


@contextmanager
def refusing(code: int) -> Iterator[None]:
    """A block whose `UserError`s go to the server as this number."""
    try:
        yield
    except Refusal:
        raise
    except UserError as error:
        raise Refusal(code, error.what, error.remedy) from error
