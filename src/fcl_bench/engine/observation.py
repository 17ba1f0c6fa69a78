"""Audits look at what clients learn from."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from fcl_bench.engine.exchange import ARRIVES, SUMMED, Round, Step, Turn
from fcl_bench.engine.transport import Transport
from fcl_bench.protocol.audit import Audit


class Observation(Step):
    """Shows the audits what clients learn from, in a task's first round.

    Args:
        audits: those that look.
        transport: sees all clients' data.
    """

    def __init__(self, audits: Mapping[str, Audit], transport: Transport) -> None:
        self._audits, self._transport = audits, transport
        self._seen: set[int] = set()

    def begin(self, round_: Round) -> None:
        self._seen = set()

    def absorbed(self, round_: Round, turn: Turn) -> None:
        reply = turn.reply
        if (
            round_.number == 0
            and reply is not None
            and turn.fate in (ARRIVES, SUMMED)
            and round_.held.labelled[turn.client]
        ):
            self._seen.add(turn.client)
            self._observe(round_, turn.client, reply.guesses)

    def finish(self, round_: Round) -> None:
        if round_.number == 0:
            for client in sorted(set(np.flatnonzero(round_.held.labelled).tolist()) - self._seen):
                self._observe(round_, client)

    def _observe(self, round_: Round, client: int, guesses: torch.Tensor | None = None) -> None:
        data = self._transport.everything
        assert data is not None
        own = data.client_data(round_.task.index, client)
        for audit in self._audits.values():
            audit.observe(round_.task, own if guesses is None else own.with_pseudo_labels(guesses))
