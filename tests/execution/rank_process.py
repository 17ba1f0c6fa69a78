"""One rank of test_ranks.py: `python -m tests.execution.rank_process PLAN`, with torchrun's variables set.

PLAN is a JSON file: a list of runs, each with `overrides` and, perhaps, the `rank` that is killed when its first turn
in the task `dies` begins. The runs are done one after the other, so that torch is imported once. Beside the plan each
rank writes the secret keys of secure sums that it has worked out, and all that other ranks sent to it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fcl_bench.execution.run
from fcl_bench.cli.app import _follow
from fcl_bench.engine.node import Node
from fcl_bench.errors import UserError
from tests.small_runs import run_in, settings_for


def doomed(task: int) -> None:
    """This process is killed, as by kill -9, when a turn of this task begins."""
    turn = Node.turn

    def killed(self: Node, client: int, broadcast: Any) -> Any:
        if broadcast.task == task:
            os.kill(os.getpid(), signal.SIGKILL)
        return turn(self, client, broadcast)

    Node.turn = killed  # type: ignore[method-assign]


def noted(folder: Path, rank: str) -> None:
    """From here on this process notes the keys that it works out (hexadecimal) and the bytes that it gets."""
    from fcl_bench.engine.remote.peers import RankPeer
    from fcl_bench.options.secure import aggregation, party

    def keys(make: Callable[..., bytes], private_alone: bool) -> Callable[..., bytes]:
        def noting(private: bytes, *others: Any) -> bytes:
            found = make(private, *others)
            with (folder / f"secrets-{rank}").open("a") as file:
                file.write("".join(f"{key.hex()}\n" for key in (private, *([] if private_alone else [found]))))
            return found

        return noting

    party.public_key = keys(party.public_key, True)  # type: ignore[assignment]
    party.agreed_key = aggregation.agreed_key = keys(party.agreed_key, False)  # type: ignore[assignment]
    receive = RankPeer.receive

    def receiving(self: RankPeer, seconds: float | None = None) -> memoryview:
        blob = receive(self, seconds)
        with (folder / f"received-{rank}").open("ab") as file:
            file.write(blob)
        return blob

    RankPeer.receive = receiving  # type: ignore[method-assign]


def main(plan: Path) -> int:
    noted(plan.parent, os.environ["RANK"])
    fcl_bench.execution.run.drawn = lambda *_: {}
    logging.getLogger("fcl_bench").setLevel(logging.INFO)
    code = 0
    for number, asked in enumerate(json.loads(plan.read_text())):
        if asked.get("rank") == int(os.environ["RANK"]):
            doomed(asked["dies"])
        settings = settings_for(plan.parent / "out", "transport=ranks", *asked["overrides"])
        try:
            if settings.transport.follows:
                code = _follow(settings)
            else:
                print(
                    f"{number} {run_in(plan.parent / 'out', 'transport=ranks', *asked['overrides']).folder}", flush=True
                )
        except UserError as error:
            print(f"{number} error: {error}", flush=True)
            code = 2
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
