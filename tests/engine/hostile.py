"""Hostile uploads: an honest run in which, beside one client's turn, every bad version of its upload is tried."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fcl_bench.engine.codec import HELD, PACKED, SCALE
from fcl_bench.engine.exchange import Arrival
from fcl_bench.engine.loop import Federation
from fcl_bench.engine.transport import Transport
from fcl_bench.engine.validation import BadUpload, validate_upload
from fcl_bench.protocol.fields import Field, SampleCounts, Schema
from fcl_bench.protocol.message import Message

#: The turns beside which hostile uploads are tried: client 1 is the second of three in the second task.
TASK, CLIENT = 1, 1
#: Names of singular values, of numbers of samples, and of numbers of classes or tasks.
SPECTRA = ("sigma", "omega")
COUNTS = ("n", "counts", "samples")
CLASSES = ("classes", "columns", "labels", "tasks")


@dataclass(frozen=True)
class Hostile:
    """One bad upload.

    Attributes:
        field: which field is bad, "samples" for the message's own number, "*" for the upload as a whole.
        kind: what is done to it.
        upload: as it travels.
    """

    field: str
    kind: str
    upload: Message


@dataclass(frozen=True)
class Told:
    """What came of one: the stage and round in which it was sent, and the refusal, None where it was admitted."""

    stage: str
    round: int
    hostile: Hostile
    refusal: str | None


Tensors = dict[str, torch.Tensor]


def variants(upload: Message, declared: Schema) -> Iterator[Hostile]:
    """All bad versions of an honest upload as it travels, by what is declared of it."""

    def of(name: str, kind: str, tensor: torch.Tensor | None) -> Hostile:
        left = {key: value for key, value in upload.items() if key != name}
        return Hostile(name, kind, upload.with_tensors(left if tensor is None else {**left, name: tensor}))

    for name in representative(upload):
        tensor = upload[name]
        yield of(name, "missing", None)
        for kind, bad in {**_any(tensor), **_by_kind(name, tensor, declared)}.items():
            yield of(name, kind, bad)
    yield Hostile("extra", "unknown field", upload.with_tensors({**upload, "extra": torch.zeros(2)}))
    yield Hostile("*", "no field", upload.with_tensors({}))
    numbers = (0, -3, 2**31 - 1, 2**62, 2.5, True) if upload.samples is not None else (0, -3, 2**40)
    for samples in numbers:
        yield Hostile("samples", f"samples={samples}", dataclasses.replace(upload, samples=samples))
    if upload.samples is not None:
        yield Hostile("samples", "no samples", dataclasses.replace(upload, samples=None))


def representative(upload: Message) -> list[str]:
    """The fields; of those that differ in the numbers of layers, blocks or tasks alone, the first."""
    return list({re.sub(r"\d+", "0", name): name for name in reversed(list(upload))}.values())[::-1]


def _any(tensor: torch.Tensor) -> Tensors:
    """Of any tensor: other shapes and types."""
    bad = {"no side": tensor.flatten()[0] if tensor.numel() else tensor.sum(), "a side more": tensor.unsqueeze(0)}
    bad["longer"] = torch.cat([tensor, tensor[:1] if len(tensor) else tensor.new_zeros(1, *tensor.shape[1:])])
    if len(tensor):
        bad["nothing"] = tensor[:0]
    if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1]:
        bad["turned"] = tensor.T.contiguous()
    bad["complex"] = tensor.to(torch.complex64)
    bad["truths"] = tensor != 0
    bad["text"] = torch.full((4,), 77, dtype=torch.uint8)
    return bad


def _by_kind(name: str, tensor: torch.Tensor, declared: Schema) -> Tensors:
    if not tensor.numel():
        return {}
    base = name.removesuffix(PACKED)
    if name.endswith(HELD):
        return {
            "a width of 2^31 - 1": _with(tensor, 0, 2**31 - 1),
            "a negative width": _with(tensor, 0, -1),
            "one column twice": torch.cat([tensor[:1], tensor[1:2].expand(len(tensor) - 1)]),
            "columns beyond": tensor + (torch.arange(len(tensor)) > 0) * int(tensor[0]),
        }
    if name.endswith(SCALE):
        found = {kind: _with(tensor, 0, value) for kind, value in _NO_NUMBERS.items()}
        return {**found, "negative": -tensor, "a wide one": tensor.repeat(*([1] * (tensor.ndim - 1)), 50)}
    if tensor.dtype == torch.uint8 and tensor.ndim == 4:
        return {"real": tensor.float(), "wider": torch.nn.functional.pad(tensor, (0, 1))}
    own = declared[base.removesuffix(SCALE)]
    if not tensor.is_floating_point():
        return {"real": tensor.double()} if own.unit else _whole(base, tensor)
    if own.form == "gram" or own.unit or base in SPECTRA or name == "Q":
        return {**_real(tensor), **_structured(base, tensor, own)}
    return _real(tensor)


_NO_NUMBERS = {"not a number": torch.nan, "infinite": torch.inf, "minus infinity": -torch.inf}


def _real(tensor: torch.Tensor) -> Tensors:
    bad = {kind: _with(tensor, 0, value) for kind, value in _NO_NUMBERS.items()}
    bad["all not a number"] = torch.full_like(tensor, torch.nan)
    bad["huge"] = _with(tensor, 0, torch.finfo(tensor.dtype).max)
    bad["all huge"] = torch.full_like(tensor, -torch.finfo(tensor.dtype).max / 4)
    bad["whole"] = tensor.to(torch.int64)
    bad["another float"] = tensor.to(torch.float32 if tensor.dtype == torch.float64 else torch.float64)
    return bad


def _structured(name: str, tensor: torch.Tensor, declared: Field) -> Tensors:
    if name in SPECTRA:
        rising = {"rising": tensor.flip(0) * torch.linspace(1, 2, len(tensor)).to(tensor)} if len(tensor) > 1 else {}
        return {"negative": -tensor - 1, **rising}
    if declared.unit:
        bad = {"twice as long": 2 * tensor}
        if declared.form == "orthonormal":
            bad["of ones"] = torch.ones_like(tensor)
            if tensor.shape[1] > 1:
                bad["a direction twice"] = tensor[:, :1].expand_as(tensor).contiguous()
        return bad
    bad = {"negative": -tensor - 1}
    if tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1] and name != "Q":
        G, mean = tensor, float(tensor.trace()) / len(tensor)
        v = torch.linalg.qr(torch.randn(len(G), 1, generator=torch.Generator().manual_seed(1)).double())[0].to(G)
        bad |= {
            "one triangle": G.triu(1) + 0.5 * G.diagonal().diag(),
            "one entry moved": _with(G, 1, float(G[0, 1]) + mean),
            "a diagonal entry below 0": _with(G, 0, -float(G[0, 0]) - mean),
            "no diagonal": G - G.diagonal().diag() + 0.0,
            "an entry too large": G + 3 * float(G.diagonal().max()) * _swap(G),
            "an eigenvalue below 0": G - (float(v.T @ G @ v) + 0.5 * float(G.trace())) * (v @ v.T),
        }
        if len(G) == 1:
            bad = {"negative": -tensor - 1}
    return bad


def _swap(G: torch.Tensor) -> torch.Tensor:
    E = torch.zeros_like(G)
    E[0, -1] = E[-1, 0] = 1
    return E


def _whole(name: str, tensor: torch.Tensor) -> Tensors:
    bad = {
        "real": tensor.double(),
        "negative": _with(tensor, 0, -1) if tensor.dtype != torch.uint8 else -tensor.int() - 1,
    }
    if name in COUNTS:
        return {
            **bad,
            "fractional": tensor.float() + 0.5,
            "absurd": torch.full_like(tensor, 2**31 - 1),
            "wrapping around": torch.full(tensor.shape, 2**62, dtype=torch.int64),
        }
    if name in CLASSES and tensor.ndim == 1:
        twice = (
            {"one twice": tensor[:1].expand(len(tensor)).contiguous()} if name != "labels" and len(tensor) > 1 else {}
        )
        return {**bad, **twice, "none of these": tensor + 1000}
    return bad


def _with(tensor: torch.Tensor, place: int, value: float) -> torch.Tensor:
    changed = tensor.clone(memory_format=torch.contiguous_format)
    changed.view(-1)[place] = value
    return changed


def tried(federation: Federation, more: Callable[[Message, Schema], Iterator[Hostile]] = variants) -> list[Told]:
    """What comes of every bad upload, in each stage of the task once; the run itself is honest and ends."""
    transport, server = federation.transport, federation.server
    exchange, told, seen = transport.exchange, [], set()

    def watched(present, broadcast):
        for reply in exchange(present, broadcast):
            where = broadcast.task, reply.client
            if where == (TASK, CLIENT) and broadcast.stage not in seen:
                seen.add(broadcast.stage)
                task = federation.stream.tasks[TASK]
                expected = server.schema(task, broadcast.stage)
                samples = [int(transport.samples(index)[0][CLIENT]) for index in range(TASK + 1)]
                announced = SampleCounts(samples[TASK], sum(samples))
                for hostile in more(reply.upload, expected):
                    refusal = None
                    try:
                        arrival = Arrival(CLIENT, hostile.upload, announced)
                        validate_upload(arrival, expected, federation._middleware, server)
                    except BadUpload as error:
                        refusal = str(error)
                    told.append(Told(broadcast.stage, broadcast.round, hostile, refusal))
            yield reply

    transport.exchange = watched  # type: ignore[method-assign]
    federation.run(lambda _: None)
    return told


def sending(transport: Transport, stage: str, round_: int, change: Callable[[Message], Message]) -> None:
    """From now on the one client's upload of that stage and round is changed on its way."""
    exchange = transport.exchange

    def watched(present, broadcast):
        for reply in exchange(present, broadcast):
            if (broadcast.task, reply.client, broadcast.stage, broadcast.round) == (TASK, CLIENT, stage, round_):
                reply = dataclasses.replace(reply, upload=change(reply.upload))
            yield reply

    transport.exchange = watched  # type: ignore[method-assign]
