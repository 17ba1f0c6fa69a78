"""The check of uploads: the server absorbs only what it expects."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial

import torch

from fcl_bench.engine.codec import Middleware, form_objection, narrower, rounding_of
from fcl_bench.engine.exchange import DROPPED, Accounting, Arrival, Round, Step, Turn
from fcl_bench.engine.transport import Transport
from fcl_bench.errors import UserError
from fcl_bench.linalg.tensors import Flat
from fcl_bench.protocol.context import WireFormat
from fcl_bench.protocol.fields import SQUARE, Field, SampleCounts, Schema
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import EVERYONE, Server
from fcl_bench.tracking.console import Notices

#: More samples than any client has: the largest int32.
MOST_SAMPLES = 2**31 - 1
#: Tolerance of sums over many samples, and of results computed from them, in roundings of their type: the wire rounds
#: once, and the statistics' type rounds at every addition.
_SUMMED, _ORTHONORMAL = 256, 1e-9
Objection = tuple[str, str, str]  # the field, what it contains, and what was expected


class BadUpload(UserError):
    """An upload is not as the server expects; the message has client, task, round, field, and what was expected.

    Attributes:
        client: the client who sent it, or the first whose upload is in it; `EVERYONE` for a sum over clients.
    """

    def __init__(self, client: int, message: Message, what: str, expected: str, sender: str = "") -> None:
        where = f"task {message.task}, round {message.round} ({message.stage})"
        whose = "the sum of the uploads" if client == EVERYONE else f"{sender or f'client {client}'}'s upload"
        super().__init__(f"{whose} in {where}: {what}", f"expected: {expected}")
        self.client = client


def validate_upload(
    arrival: Arrival, expected: Schema, middleware: Middleware, server: Server, proven: bool = False
) -> Message:
    """The upload as the server absorbs it.

    Args:
        proven: whether a Gram matrix has to be one for certain, at the cost of a Cholesky factorisation.
        server: asked for objections; its context defines the wire format and types that an upload has to use.

    Raises:
        BadUpload: the upload can't be decoded; a field is missing, unknown, of another shape or type, not finite, out
            of its range or not of its form; or the fields contradict each other.
    """
    upload, announced, context = arrival.upload, arrival.announced, server.context
    wire = replace(context.wire, dtype=torch.float64) if arrival.exact else context.wire

    def bad(what: str, wanted: str) -> BadUpload:
        return BadUpload(arrival.client, upload, what, wanted, arrival.sender)

    if upload.clients != arrival.clients:
        raise bad(f"clients={upload.clients}", f"{arrival.clients}, since it is of so many")
    if context.release is not None:
        expected = context.release.loosened(expected, arrival.clients)
    if found := form_objection(upload, expected, wire):
        raise bad(f"{found[0]} {found[1]}", found[2])
    try:
        message = middleware.receive(upload, arrival.client)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise bad(f"it cannot be decoded ({error})", ", ".join(expected)) from error
    errors = _relative_errors(arrival, message, expected, context.dtype)
    largest = _largest(context.dtype, wire)
    if found := first_objection(message.tensors, expected, errors, announced, largest, proven):
        raise bad(f"{found[0]} {found[1]}", found[2])
    if (samples := upload.samples) is not None:
        most = MOST_SAMPLES if announced is None else announced.run
        if type(samples) is not int or not 1 <= samples <= most:
            raise bad(f"samples={samples}", f"a whole number, at least 1 and at most {most}")
    message = _widened(message, expected, context.dtype)
    if trouble_found := server.objection(message):
        raise bad(trouble_found, "fields that agree with each other")
    return message


def _relative_errors(arrival: Arrival, message: Message, expected: Schema, dtype: torch.dtype) -> dict[str, float]:
    """The relative error of the numbers of each field that is looked at jointly, or compared with such a field."""
    joint = {name for name, wanted in expected.items() if wanted.joint}
    joint |= {expected[name].of for name in joint if expected[name].of in expected}
    errors = {name: rounding_of(arrival.upload, name) + _SUMMED * torch.finfo(dtype).eps for name in joint}
    if not arrival.rounding:
        return errors
    return {name: error + _root_of(arrival.rounding, message.get(name)) for name, error in errors.items()}


def _widened(message: Message, expected: Schema, dtype: torch.dtype) -> Message:
    """The message in the statistics' type, except for fields that are only added up."""
    narrow = {
        name: tensor.to(dtype)
        for name, tensor in message.tensors.items()
        if narrower(tensor, dtype) and not expected[name].added
    }
    return message.with_tensors({**message, **narrow}) if narrow else message


def _root_of(rounding: float, tensor: torch.Tensor | None) -> float:
    """The relative error that stands for an absolute error of the entries: the root of their ratio.

    It is a root because a Gram matrix's off-diagonal entries are compared with roots of diagonal ones: where a diagonal
    entry below the rounding is lost, its row can still have entries as large as the root of it.
    """
    if tensor is None or not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    largest = float(tensor.abs().max())
    return min(1.0, (rounding / largest) ** 0.5) if largest > 0 else 1.0


def first_objection(
    tensors: Mapping[str, torch.Tensor],
    expected: Schema,
    rounding: Mapping[str, float] | None = None,
    announced: SampleCounts | None = None,
    largest: float = math.inf,
    proven: bool = False,
) -> Objection | None:
    """What is wrong with an upload: the field, what it contains, and what was expected. None if nothing is wrong.

    Args:
        proven: see `validate_upload`.
        rounding: relative errors of the fields' numbers; left out: those of float64.
        largest: the largest allowed absolute value of a real number.
    """
    for name, wanted in expected.items():
        if name not in tensors and not wanted.optional:
            return name, "is missing", f"the fields {', '.join(expected)}"
    sides: dict[str, int] = {}
    ends = _extremes(tensors, expected, largest)
    for name, tensor in tensors.items():
        if name not in expected:
            return name, "is no field of this upload", f"the fields {', '.join(expected)}"
        wanted = expected[name]
        # Where all sides are numbers, there is nothing else to look at.
        if tensor.shape != wanted.shape and not _fits(tensor.shape, wanted, sides):
            shape = ", ".join(f"{side}={sides[side]}" if side in sides else str(side) for side in wanted.shape)
            return name, f"has the shape {tuple(tensor.shape)}", f"({shape})"
        if trouble := _values(tensor, wanted, largest, ends.get(name)):
            return name, *trouble
    rounding = dict.fromkeys(expected, torch.finfo(torch.float64).eps) if rounding is None else rounding
    # These cost more, so they come last.
    for name in tensors:
        if expected[name].joint and (trouble := _form(name, tensors, expected[name], rounding, announced, proven)):
            return name, *trouble
    return None


def _fits(shape: torch.Size, wanted: Field, sides: dict[str, int]) -> bool:
    """Whether a tensor has the expected sides; lengths of named ones are entered in `sides`."""
    return len(wanted.shape) == len(shape) and all(
        length == (sides.setdefault(side, length) if isinstance(side, str) else side)
        for side, length in zip(wanted.shape, shape, strict=True)
    )


def _values(
    tensor: torch.Tensor, wanted: Field, largest: float, ends: tuple[float, float] | None = None
) -> tuple[str, str] | None:
    """What is wrong with single numbers; `ends` are the least and the largest, where they are known."""
    right_kind = {
        "real": tensor.is_floating_point(),
        "whole": not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool,
        "bytes": tensor.dtype == torch.uint8,
    }[wanted.kind]
    if not right_kind:
        kinds = {"real": "a floating-point type", "whole": "an integer type", "bytes": "uint8"}
        return f"has the type {str(tensor.dtype).removeprefix('torch.')}", kinds[wanted.kind]
    if wanted.widest is not None and tensor.ndim and tensor.shape[-1] > wanted.widest:
        return f"has {tensor.shape[-1]} columns", f"at most {wanted.widest}"
    if not tensor.numel() or wanted.kind == "bytes":
        return None
    # The extremes of a tensor that holds a NaN are NaN, and every comparison with NaN is false.
    least, most = ends or (end.item() for end in torch.aminmax(tensor))
    if wanted.kind == "real":
        if not (least > -math.inf and most < math.inf):
            return "is not finite", "finite numbers"
        if max(-least, most) > largest:
            return f"holds {most if most > -least else least:.3g}", f"numbers of at most {largest:.3g}"
    if wanted.least is not None and least < wanted.least:
        return f"holds {least:g}", f"no value below {wanted.least:g}"
    if wanted.below is not None and most >= wanted.below:
        return f"holds {most:g}", f"values below {wanted.below}"
    if wanted.most is not None and most > wanted.most:
        return f"holds {most:g}", f"no value above {wanted.most:g}"
    return None


def _extremes(tensors: Mapping[str, torch.Tensor], expected: Schema, largest: float) -> dict[str, tuple[float, float]]:
    """Numbers between which all of each real tensor's lie: its least and its largest, where wider ones are no proof.

    They are read at once, and first from the tensors' norms, which no number exceeds: a network has tens of tensors,
    and a GPU takes as long for each as for the norms of all.
    """
    names = [
        name
        for name, tensor in tensors.items()
        if name in expected and expected[name].kind == "real" and tensor.is_floating_point() and tensor.numel()
    ]
    if not names:
        return {}
    if isinstance(tensors, Flat):
        norms = [float(torch.linalg.vector_norm(tensors.buffer))] * len(names)
    else:
        norms = torch.stack(torch._foreach_norm([tensors[name] for name in names])).tolist()
    # Twice the norm, since it is rounded too. One that is infinite or NaN proves nothing.
    found = {name: (-2 * norm, 2 * norm) for name, norm in zip(names, norms, strict=True)}
    unsure = [name for name in names if _values(tensors[name], expected[name], largest, found[name])]
    if unsure:
        ends = torch.stack([end for name in unsure for end in torch.aminmax(tensors[name])]).view(-1, 2).tolist()
        found |= {name: (least, most) for name, (least, most) in zip(unsure, ends, strict=True)}
    return found


def _largest(dtype: torch.dtype, wire: WireFormat) -> float:
    """Numbers up to this size can be multiplied in the types of the wire and of the statistics without overflow."""
    exact = wire.dtype == dtype == torch.float64
    return torch.finfo(torch.float64 if exact else torch.float32).max ** 0.5 / 2


def _form(
    name: str,
    tensors: Mapping[str, torch.Tensor],
    wanted: Field,
    rounding: Mapping[str, float],
    announced: SampleCounts | None,
    proven: bool,
) -> tuple[str, str] | None:
    """What is wrong with the field's numbers jointly, and in relation to other fields of the upload."""
    tensor, error = tensors[name], rounding[name]
    if wanted.kind == "whole":
        return _whole(tensor, wanted, announced)
    # Imported only where a method declares such a field; models have none.
    from fcl_bench.linalg.structure import longer_trouble, noisy_gram_trouble, sums_trouble

    if wanted.per_sample is not None and announced is not None and tensor.numel():
        most, found = announced.task * wanted.per_sample, float(tensor.abs().max())
        if found > (1 + 4 * error) * most:
            return f"holds {found:.4g}", f"at most {most:.4g} of {announced.task} samples"
    if wanted.longest is not None and announced is not None:
        square, n, longest = wanted.one_sample == SQUARE, announced.task, wanted.longest
        most = n * longest**2 + len(tensor) * wanted.shift if square else n * longest
        if trouble_found := longer_trouble(tensor, square, most, wanted.noise, error):
            return trouble_found, f"sums over {n} samples that are no longer than {longest:g}"
    if wanted.form == "noisy gram":
        if trouble_found := noisy_gram_trouble(tensor, error, wanted.noise, proven):
            what = f"{trouble_found} beyond what its noise explains"
            return what, "a symmetric, positive semidefinite matrix with noise on it"
    elif wanted.form:
        trouble, words = _forms(proven)[wanted.form]
        if trouble_found := trouble(tensor, max(error, _ORTHONORMAL) if wanted.form == "orthonormal" else error):
            return trouble_found, words
    if wanted.zero_without and (trouble_found := _without_samples(tensor, tensors.get(wanted.zero_without))):
        return trouble_found, f"zeros where {wanted.zero_without} says that there is no sample"
    if wanted.of and (wanted.by or announced is not None):
        samples = tensors[wanted.by] if wanted.by else float(announced.task if announced else 0)
        trace = float(tensors[wanted.of].diagonal().sum(dtype=torch.float64))
        if trouble_found := sums_trouble(tensor, trace, samples, max(error, rounding[wanted.of]), wanted.of):
            return trouble_found, f"sums over the samples of {wanted.of}"
    return None


@cache
def _forms(proven: bool) -> dict[str, tuple[Callable[[torch.Tensor, float], str], str]]:
    """What is wrong with the numbers of a form, and what was expected."""
    from fcl_bench.linalg import structure

    return {
        "gram": (partial(structure.gram_trouble, proven=proven), "a symmetric, positive semidefinite matrix"),
        "packed grams": (
            partial(structure.packed_grams_trouble, proven=proven),
            "triangles of symmetric, positive semidefinite matrices",
        ),
        "orthonormal": (structure.orthonormal_trouble, "orthonormal columns"),
        "descending": (structure.descending_trouble, "singular values, the largest first"),
    }


def _without_samples(sums: torch.Tensor, sizes: torch.Tensor | None) -> str:
    """How sums (M, c) contradict `sizes` (c,), the number of samples of each column; "": they do not."""
    if sizes is None or not sums.numel():
        return ""
    empty = sizes.flatten() == 0
    contradicting = int((sums != 0).any(dim=0)[empty].sum()) if len(empty) == sums.shape[1] else 0
    return f"has {contradicting} columns of no sample that are not zero" if contradicting else ""


def _whole(tensor: torch.Tensor, wanted: Field, announced: SampleCounts | None) -> tuple[str, str] | None:
    if not tensor.numel():
        return None
    if wanted.form == "distinct" and len(tensor.unique()) < tensor.numel():
        return "names something twice", "different numbers"
    if wanted.among is not None and (others := sorted({*tensor.flatten().tolist()} - wanted.among)):
        return f"holds {others[0]}", f"some of {', '.join(map(str, sorted(wanted.among)))}"
    if wanted.speaks_for:
        most = MOST_SAMPLES if announced is None else getattr(announced, wanted.speaks_for)
        # Noise moves counts up as far as down. In float64, since sums of integers wrap around.
        room = tensor.numel() * -(wanted.least or 0.0)
        if (total := float(tensor.double().sum())) > most + room:
            return f"counts {total:.6g} samples", f"at most the {most} that the client has"
    return None


class Validation(Step):
    """Only uploads as the server expects them are absorbed; others end the run, or are left out of the round."""

    def __init__(
        self,
        middleware: Middleware,
        server: Server,
        transport: Transport,
        notices: Notices,
        drops: bool,
    ) -> None:
        self._middleware, self._server, self._drops = middleware, server, drops
        self._transport, self._notices = transport, notices

    def passed(self, round_: Round, turns: Iterator[Turn]) -> Iterator[Turn]:
        for turn in turns:
            if turn.arrival is not None:
                turn.source = turn.arrival.client
                with round_.watch.running():
                    turn.upload = self.received(round_, turn)
                turn.arrival = None
            yield turn
            del turn

    def received(self, round_: Round, turn: Turn) -> Message | None:
        """What a turn brings, decoded and validated; None: it was refused, and the client has its old state again.

        Raises:
            BadUpload: see `read`.
        """
        assert turn.arrival is not None
        upload = self.read(turn.arrival, round_.schema)
        if upload is None:
            self._transport.refused(turn.client)
            round_.columns[DROPPED][turn.client] = 1
            turn.fate = DROPPED
        return upload

    def read(self, arrival: Arrival, schema: Schema) -> Message | None:
        """What the receiver computes with; None: one client's upload is not as expected and is left out.

        Raises:
            BadUpload: it is not as expected, and the run is set to end in this case, or several clients made it.
        """
        try:
            return validate_upload(arrival, schema, self._middleware, self._server, self._transport.strangers)
        except BadUpload as bad:
            if not self._drops or arrival.sender or arrival.client == EVERYONE:
                raise
            self._notices.tell(f"client {arrival.client}", f"{bad}; it is left out of the round (on_bad_upload=drop)")
            return None


#: Makes a step that an option adds, given the accounting and the validation of the exchange.
OptionStep = Callable[[Accounting, Validation], Step]
