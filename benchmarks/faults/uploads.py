"""One client's upload is corrupted on its way, in a whole run of each method.

Requirements: with `on_bad_upload=fail` the run ends with one line that names the client, and with `drop` it ends, the
client is left out of that round, the ledger says so, and the model is finite; or the upload is, once decoded, the one
that an honest client sends. Lies that some data would give are listed in docs/explanation/hostile_uploads.md, and not
tried.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.faults.forks import forked
from benchmarks.faults.part import Part
from fcl_bench.engine.loop import Federation
from fcl_bench.engine.validation import BadUpload
from fcl_bench.protocol.fields import Schema
from fcl_bench.protocol.message import Message
from tests.conformance.cases import (
    COMPACT,
    FLOAT32,
    MAY_BE_LEFT_OUT,
    MORE,
    federation_for,
    method_of,
    same_once_decoded,
)
from tests.engine.hostile import CLIENT, TASK, Hostile, sending, variants
from tests.small_methods import NAMES

CASES = [*((name, {}) for name in NAMES), *MORE]
WIRES = {"float32": FLOAT32, "float16, packed": COMPACT}

CASES = [*((name, {}) for name in NAMES), *MORE]
WIRES = {"float32": FLOAT32, "float16, packed": COMPACT}
#: Uploads tried of one method and wire, at most.
_EACH = 6


class Uploads(Part):
    """Cases are `<method>|<wire>|<stage>|<field>|<what is done>|<fail or drop>`."""

    name, quick, full = "uploads", 24, 400

    def __init__(self, scratch: Path, seed: int = 0) -> None:
        super().__init__(scratch, seed)
        self._methods = {_title(name, knobs): (name, knobs) for name, knobs in CASES}
        self._sent: dict[tuple[str, str], dict[str, tuple[int, Message, Schema]]] = {}

    def cases(self, most: int) -> Sequence[str]:
        rng = random.Random(f"{self.seed}:uploads")
        pairs = [(method, wire) for method in self._methods for wire in WIRES]
        rng.shuffle(pairs)
        if most:
            pairs = pairs[: max(4, most // _EACH)]
        drawn = []
        for method, wire in pairs:
            found = [
                f"{method}|{wire}|{stage}|{hostile.field}|{hostile.kind}"
                for stage, (_, upload, declared) in self._honest(method, wire).items()
                for hostile in variants(upload, declared)
            ]
            drawn += rng.sample(found, min(len(found), -(-most // len(pairs)))) if most else found
        return [f"{case}|{('fail', 'drop')[number % 2]}" for number, case in enumerate(drawn)]

    def tried(self, case: str) -> str:
        method, wire, stage, field, kind, mode = case.split("|")
        round_, honest, declared = self._honest(method, wire)[stage]
        [hostile] = [one for one in variants(honest, declared) if (one.field, one.kind) == (field, kind)][:1]
        return forked(lambda: self._sends(method, wire, stage, round_, honest, hostile, mode)).out.strip()

    def count(self, case: str) -> str:
        return "refused or the same"

    def _sends(
        self, method: str, wire: str, stage: str, round_: int, honest: Message, hostile: Hostile, mode: str
    ) -> int:
        run = self._made(method, wire, drops=mode == "drop")
        sending(run.transport, stage, round_, lambda _: hostile.upload)
        refused = ""
        try:
            run.run(lambda _: None)
        except BadUpload as error:
            refused = str(error)
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
            return 1
        print(self._judged(run, refused, method, round_, honest, hostile, mode))
        return 0

    def _judged(
        self, run: Federation, refused: str, method: str, round_: int, honest: Message, hostile: Hostile, mode: str
    ) -> str:
        told = run.state.ledger.dropped()
        left_out = hostile.kind == "missing" and (self._methods[method][0], hostile.field) in MAY_BE_LEFT_OUT
        same = hostile.upload.samples == honest.samples and same_once_decoded(hostile.upload, honest)
        if refused:
            named = refused.startswith(f"client {CLIENT}'s upload in task {TASK}, round {round_} (")
            return "" if mode == "fail" and named and refused.isprintable() else f"told in these words: {refused}"
        if mode == "drop" and told:
            if told != [(CLIENT, round_)]:
                return f"left out are {told}"
            model = [value for value in run.server.model().values() if value.is_floating_point()]
            return "" if all(bool(torch.isfinite(value).all()) for value in model) else "the model is not finite"
        return "" if left_out or same else "taken without a word"

    def _made(self, method: str, wire: str, drops: bool = False) -> Federation:
        name, knobs = self._methods[method]
        return federation_for(method_of(name, **knobs), WIRES[wire], drops=drops)

    def _honest(self, method: str, wire: str) -> dict[str, tuple[int, Message, Schema]]:
        """By stage, the round, the upload of the one client in an honest run, and what is declared of it."""
        if (method, wire) not in self._sent:
            found: dict[str, tuple[int, Message, Schema]] = {}
            run = self._made(method, wire)
            exchange = run.transport.exchange

            def noted(present, broadcast):  # type: ignore[no-untyped-def]
                for reply in exchange(present, broadcast):
                    if (broadcast.task, reply.client) == (TASK, CLIENT):
                        kept = {name: value.clone() for name, value in reply.upload.items()}
                        upload = dataclasses.replace(reply.upload, tensors=kept)
                        declared = run.server.schema(run.stream.tasks[TASK], broadcast.stage)
                        found.setdefault(broadcast.stage, (broadcast.round, upload, declared))
                    yield reply

            run.transport.exchange = noted  # type: ignore[method-assign]
            run.run(lambda _: None)
            self._sent[method, wire] = found
        return self._sent[method, wire]


def _title(name: str, knobs: dict[str, object]) -> str:
    told = [f"{key}={value}" for key, value in knobs.items() if isinstance(value, (str, int, float, bool))]
    return " ".join([name, *told])
