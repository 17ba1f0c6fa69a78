"""Audits look at what clients learn from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from fcl_bench.engine.exchange import ARRIVES, SUMMED, Round, Step, Turn
from fcl_bench.engine.transport import Transport
from fcl_bench.protocol.audit import Audit


class Observation(Step):
    """Shows the audits what clients learn from, in a task's first round."""

    def __init__(self, audits: Mapping[str, Audit], transport: Transport) -> None:
        self._audits, self._transport = audits, transport

    def passed(self, round_: Round, turns: Iterator[Turn]) -> Iterator[Turn]:
        if round_.number > 0:
            yield from turns
            return
        unseen = set(np.flatnonzero(round_.held.labelled).tolist())
        for turn in turns:
            yield turn
            if turn.reply is not None and turn.fate in (ARRIVES, SUMMED) and turn.client in unseen:
                unseen.remove(turn.client)
                self._observe(round_, turn.client, turn.reply.guesses)
            del turn
        for client in sorted(unseen):
            self._observe(round_, client)

    def _observe(self, round_: Round, client: int, guesses: torch.Tensor | None = None) -> None:
        data = self._transport.everything
        assert data is not None
        own = data.client_data(round_.task.index, client)
        for audit in self._audits.values():
            audit.observe(round_.task, own if guesses is None else own.with_pseudo_labels(guesses))
