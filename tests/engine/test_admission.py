"""Nothing is absorbed but what a server expects: every kind of bad upload, and all methods' honest ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fcl_bench.engine.codec import Chain, Codec, Middleware
from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.loop import Federation
from fcl_bench.engine.node import UNKNOWN, Node, NodeData
from fcl_bench.engine.validation import BadUpload, first_objection
from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.centralised import Centralised
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.closed_form.afcl import AFCL
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.centralised_ridge import CentralisedRidge
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.methods.closed_form.gaussian_sketch import GaussianSketch
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.methods.closed_form.stsa_e import STSAE
from fcl_bench.methods.data_free.mfcl import MFCL, Generation
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.methods.projection.fot import FOT
from fcl_bench.protocol.context import WIRE_DTYPES
from fcl_bench.protocol.fields import Uploads, real
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Client, Method
from fcl_bench.training.knobs import Training
from tests.methods.harness import context_of
from tests.methods.test_fedprotip_tip import UPDATED
from tests.methods.training_harness import feature_tasks, federation_of, image_tasks, tiny_context

Change = Callable[[Message], Message]

FAST = Training(rounds=2, epochs=1, batch_size=8, lr=0.05, augment="none")
#: The turn that goes wrong: client 1 is the second of three in the second task.
TASK, CLIENT = 1, 1


# Bad uploads ----------------------------------------------------------------------------------------------------------


class BadClient(Client):
    """Does what the method's client does, and then, in the one turn, something else."""

    def __init__(self, client: Client, change: Change, stage: str) -> None:
        self._client, self._change, self._stage = client, change, stage

    def update(self, client_data, broadcast, state):
        upload, state = self._client.update(client_data, broadcast, state)
        bad = (client_data.task, client_data.client, broadcast.stage) == (TASK, CLIENT, self._stage)
        return self._change(upload) if bad else upload, state


class AfterTheCodec(Middleware):
    """Changes what travels, where the codec can't see it any more."""

    def __init__(self, change: Change, stage: str) -> None:
        self._change, self._stage = change, stage

    def send(self, message, client):
        bad = (message.task, client, message.stage) == (TASK, CLIENT, self._stage)
        return self._change(message) if bad else message


def without(name: str) -> Change:
    return lambda upload: upload.with_tensors({key: value for key, value in upload.items() if key != name})


def put(name: str, of: Callable[[torch.Tensor | None], torch.Tensor]) -> Change:
    """Another tensor in place of one, or beside the others."""
    return lambda upload: upload.with_tensors({**upload, name: of(upload.get(name))})


def one_entry(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The first entry is this one."""

    def change(tensor):
        changed = tensor.clone()
        changed.view(-1)[0] = value
        return changed

    return change


def features(**wire: str):
    return context_of(6, **wire), feature_tasks(0, [3, 3], [[12, 9, 8], [10, 11, 9]])


def images(**wire: str):
    return tiny_context(**wire), image_tasks(np.random.default_rng(0), [3, 3], [[12, 9, 8], [10, 11, 9]])


STATISTICS, MODEL, BASES, REFERENCES = "statistics", "model", "bases", "references"
HEAD = "heads.1.weight"
#: (method, problem and tasks, stage and its round, what is done to the upload, what is said, what was expected).
MADE = {
    "missing": (STSA(M=8), features(), STATISTICS, 0, without("C"), "C is missing", "the fields G, C"),
    "shape": (STSA(M=8), features(), STATISTICS, 0, put("C", lambda C: C[:, :2]), "C has the shape (8, 2)", "(8, 3)"),
    "two lengths by one name": (
        *(FedRAN(M=8, rank=3), features(), STATISTICS, 0, put("sigma", lambda sigma: sigma[:2])),
        *("sigma has the shape (2,)", "(r=3)"),
    ),
    "whole numbers for real ones": (
        *(STSA(M=8), features(), STATISTICS, 0, put("G", lambda G: G.long())),
        *("G has the type int64", "a floating-point type"),
    ),
    "real numbers for whole ones": (
        *(STSAE(M=8, dummy_clients=2), features(), STATISTICS, 0, put("n", lambda n: n.double())),
        *("n has the type float64", "an integer type"),
    ),
    "negative counts": (
        *(CentredSketch(M=8, rank=2), features(), STATISTICS, 0, put("n", one_entry(-1))),
        *("n holds -1", "no value below 0"),
    ),
    "a class that is not there": (
        *(AFCL(), features(), "registration", 0, put("classes", one_entry(6))),
        *("classes holds 6", "some of 3, 4, 5"),
    ),
    "columns that are not there": (
        *(AFCL(), features(), STATISTICS, 1, put("columns", one_entry(-1))),
        *("columns holds -1", "some of 3, 4, 5"),
    ),
    "fewer columns than numbers": (
        *(AFCL(), features(), STATISTICS, 1, put("columns", lambda columns: columns[1:])),
        *("columns has 2 numbers, W_known", "fields that agree"),
    ),
    "more directions than asked for": (
        *(FedRAN(M=8, rank=3), features(), STATISTICS, 0),
        lambda upload: upload.with_tensors(
            {**upload, "V": torch.eye(8)[:, :5].double(), "sigma": torch.ones(5).double()}
        ),
        *("V has 5 columns", "at most 3"),
    ),
    "sums of no sample, centred sketch": (
        *(CentredSketch(M=8, rank=2), features(), STATISTICS, 0, put("n", one_entry(0))),
        *("S has 1 columns of no sample that are not zero", "zeros where n says"),
    ),
    "input sums of no sample": (
        *(GaussianSketch(M=8, rank=2, class_rank=2), features(), STATISTICS, 0),
        put("n", torch.zeros_like),
        *("S_z has 3 columns of no sample that are not zero", "zeros where n says"),
    ),
    "directions of no class": (
        *(GaussianSketch(M=8, rank=2, class_rank=2), features(), STATISTICS, 0),
        *(put("widths", torch.zeros_like), "codes_z are not those of 0 columns", "fields that agree"),
    ),
    "sums of no sample, STSA-E": (
        *(STSAE(M=8, dummy_clients=2), features(), STATISTICS, 0, put("n", torch.zeros_like)),
        *("C has 6 columns of no sample that are not zero", "zeros where n says"),
    ),
    "another task's labels": (
        *(CentralisedRidge(M=8), features(), STATISTICS, 0, put("labels", one_entry(6))),
        *("labels holds 6", "some of 3, 4, 5"),
    ),
    "no sample": (
        *(FedAvg(training=FAST), images(), MODEL, 1, lambda upload: dataclasses.replace(upload, samples=0)),
        *("samples=0", "at least 1"),
    ),
    "no number of samples": (
        *(FedAvg(training=FAST), images(), MODEL, 1, lambda upload: dataclasses.replace(upload, samples=None)),
        *("it does not say how many samples it is of", "fields that agree"),
    ),
    "a weight is missing": (FedAvg(training=FAST), images(), MODEL, 1, without(HEAD), f"{HEAD} is missing", HEAD),
    "a basis of another layer": (
        *(FedProTIP(training=FAST, columns=8), images(), BASES, 2, put("heads", lambda U: U[1:])),
        *("heads has the shape (31, ", "(32, r of heads)"),
    ),
    "a reference too long": (
        *(FedProTIP(training=FAST, columns=8), images(), REFERENCES, 3, put("reference", lambda r: torch.zeros(3))),
        *("reference has the shape (3,)", "(2)"),
    ),
    "a sketch too wide": (
        *(FOT(training=FAST, columns=8, projected_heads=True), images(), BASES, 2),
        *(put("heads", lambda A: torch.cat([A, A], dim=1)), "heads has the shape (32, 320)", "(32, 160)"),
    ),
    "a negative part of the inputs outside the bases": (
        *(FOT(training=FAST, columns=8, share_of="inputs"), images(), BASES, 2),
        *(put("outside", one_entry(-1e9)), "outside holds -1e+09", "no value below 0"),
    ),
    "more outside the bases than there are inputs": (
        *(FOT(training=FAST, columns=8, share_of="inputs"), images(), BASES, 2),
        *(put("outside", one_entry(1e12)), "outside holds 1e+12", "samples"),
    ),
    "pictures in another type": (
        *(Centralised(training=FAST), images(), "samples", 0, put("images", lambda x: x.int())),
        *("images has the type int32", "uint8"),
    ),
}
PACKED, HELD = features(gram="packed"), features(columns="held")
CANT = "it cannot be decoded ("
#: The same, of what travels.
TRAVELLED = {
    "unknown": (
        *(AFL(), features(), STATISTICS, 0, put("note", lambda _: torch.zeros(1))),
        *("note is no field of this upload", "the fields C, W"),
    ),
    "not a number": (STSA(M=8), features(), STATISTICS, 0, put("G", one_entry(torch.nan)), "G is not finite", "finite"),
    "infinite": (
        *(FedAvg(training=FAST), images(), MODEL, 1, put(HEAD, one_entry(torch.inf))),
        *(f"{HEAD} is not finite", "finite"),
    ),
    "no triangle": (STSA(M=8), PACKED, STATISTICS, 0, put("G::packed", lambda G: G[:-1]), CANT, "G, C"),
    "a triangle of another size": (
        *(STSA(M=8), PACKED, STATISTICS, 0, put("G::packed", lambda G: G[:28])),
        *("G has the shape (7, 7)", "(8, 8)"),
    ),
    "numbers beyond the width": (
        *(STSA(M=8), HELD, STATISTICS, 0, put("C::held", lambda n: n + 3 * (n < 3))),
        *("C names columns 3 to 5", "0 to 2"),
    ),
    "a width that nobody has memory for": (
        *(STSA(M=8), HELD, STATISTICS, 0, put("C::held", one_entry(2**31 - 1))),
        *("C is said to have 2147483647 columns", "3"),
    ),
    "a width of the sender's choice that nobody has memory for": (
        *(AFCL(), HELD, STATISTICS, 1, put("W_unknown::held", one_entry(2**31 - 1))),
        *("W_unknown is said to have 2147483647 columns", "at most 3"),
    ),
    "another type than the wire's": (
        *(STSA(M=8), features(wire="float32"), STATISTICS, 0, put("G", lambda G: G.double())),
        *("G travels as float64", "float32"),
    ),
    "more numbers than columns": (
        *(STSA(M=8), HELD, STATISTICS, 0, put("C::held", lambda n: torch.cat([n, n[-1:]]))),
        *("C comes with 4 numbers of its 3 columns", "one for each column"),
    ),
    "no numbers": (
        *(STSA(M=8), HELD, STATISTICS, 0, put("C::held", lambda n: n[:0])),
        *("C comes with no numbers of its columns", "the width"),
    ),
    "a negative width": (
        *(STSA(M=8), HELD, STATISTICS, 0, put("C::held", one_entry(-2))),
        *("C is said to have -2 columns", "3"),
    ),
    "scales of other columns": (
        *(STSA(M=8), features(wire="float16"), STATISTICS, 0, put("C::scale", lambda s: s.repeat(1, 2))),
        *("C has scales of the shape (1, 6)", "one for each column"),
    ),
    "a scale that is not a number": (
        *(STSA(M=8), features(wire="bfloat16"), STATISTICS, 0, put("G::scale", one_entry(torch.nan))),
        *("G has a scale that is no positive number", "positive finite numbers"),
    ),
}
CASES = [(*case, False) for case in MADE.values()] + [(*case, True) for case in TRAVELLED.values()]


def refused(federation: Federation) -> tuple[UserError, list[int]]:
    """What a run is told, and who was absorbed in the round at hand; the server is as it was after them."""
    server, absorbed, states = federation.server, [], []
    absorb, broadcast = server.absorb, server.broadcast

    def noted(client, upload):
        absorb(client, upload)
        absorbed.append(client)
        states.append({name: value.clone() for name, value in server.state_dict().items()})

    server.absorb = noted
    server.broadcast = lambda *where: absorbed.clear() or broadcast(*where)
    with pytest.raises(UserError) as told:
        federation.run(lambda _: None)
    after = server.state_dict()
    assert after.keys() == states[-1].keys()
    assert all(torch.equal(value, states[-1][name]) for name, value in after.items())
    return told.value, absorbed


@pytest.mark.parametrize("case", CASES, ids=[*MADE, *TRAVELLED])
def test_a_bad_upload_is_one_line_and_nothing_of_it_is_absorbed(case):
    method, (context, tasks), stage, round_, change, said, expected, travelled = case

    def transport(method, context, shards, columns, labelled, inputs):
        data = NodeData(context, shards, np.where(labelled, columns, UNKNOWN), inputs)
        uploads = Uploads.of(method, context)
        steps: list[Middleware] = [Codec(uploads, context.wire)]
        client: Client = method.client(context)
        if travelled:
            steps.append(AfterTheCodec(change, stage))
        else:
            client = BadClient(client, change, stage)
        return InProcess(Node(client, context, data, Chain(steps), uploads))

    federation = federation_of(method, context, tasks, transport=transport)
    error, absorbed = refused(federation)
    assert type(error) is BadUpload
    [line] = str(error).splitlines()
    first = round_ if stage != MODEL else 0  # the model's rounds are all of one stage
    assert line.startswith(f"client {CLIENT}'s upload in task {TASK}, round {first} ({stage}): {said}")
    assert "(expected: " in line
    assert expected in line.split("(expected: ")[1]
    assert absorbed == [0]
    assert federation.state.tasks_done == TASK


# Honest ones ----------------------------------------------------------------------------------------------------------

SSL = FedRAN(M=8, rank=3, ssl=True, tau=-1.0)
#: Every method, with knobs that change its uploads; the stages of its rounds.
CLOSED_FORM: dict[str, Method] = {
    "afl": AFL(),
    "afl with random features": AFL(M=8),
    "afcl": AFCL(),
    "stsa": STSA(M=8),
    "stsa without random features": STSA(M=None),
    "stsa_e": STSAE(M=8, dummy_clients=3),
    "fedran": FedRAN(M=8, rank=3),
    "fedran with a budget": FedRAN(M=8, rank=None, budget_bytes=400),
    "fedran with pseudo-labels": SSL,
    "centred_sketch": CentredSketch(M=8, rank=2),
    "centred_sketch of rank 0": CentredSketch(M=8, rank=0),
    "gaussian_sketch": GaussianSketch(M=8, rank=2, class_rank=2),
    "centralised_ridge": CentralisedRidge(M=8),
}
GRADIENT: dict[str, tuple[Method, list[str]]] = {
    "fedavg": (FedAvg(training=FAST), [MODEL, MODEL]),
    "fedavg of some clients": (FedAvg(training=dataclasses.replace(FAST, fraction=0.5)), [MODEL, MODEL]),
    "centralised": (Centralised(training=FAST), ["samples"]),
    "fot": (FOT(training=FAST, columns=8), [MODEL, MODEL, BASES]),
    "mfcl": (MFCL(training=FAST, synthetic=4, generator=Generation(noise=5, width=4, steps=2)), [MODEL, MODEL]),
    "fedprotip": (FedProTIP(training=FAST, columns=8), [MODEL, MODEL, BASES, REFERENCES]),
    "fedprotip without routes": (FedProTIP(training=FAST, columns=8, tip=None), [MODEL, MODEL, BASES]),
    "fedprotip, updated": (FedProTIP(training=FAST, columns=8, tip=UPDATED), [MODEL, MODEL, BASES, REFERENCES]),
    "fedprotip, sketched": (FedProTIP(training=FAST, columns=8, sketch=40), [MODEL, MODEL, BASES, REFERENCES]),
}
#: A client without samples, one with a single one; many classes in the first task and few later.
SIZES = [[14, 0, 9], [8, 1, 7], [6, 5, 0]]
WIRES = [
    *({"wire": name} for name in WIRE_DTYPES),
    {"wire": "float16", "gram": "packed", "columns": "held", "projection": "matrix"},
]


LISTED = {method.name for method in [*CLOSED_FORM.values(), *(method for method, _ in GRADIENT.values())]}


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: " ".join(wire.values()))
@pytest.mark.parametrize("method", CLOSED_FORM.values(), ids=CLOSED_FORM.keys())
def test_uploads_of_the_closed_form_methods_are_admitted(method, wire):
    federation = federation_of(method, context_of(6, **wire), feature_tasks(0, [5, 2, 3], SIZES))
    state = federation.run(lambda _: None)
    assert state.tasks_done == 3
    rounds = federation.server.rounds(federation.stream.tasks[0])
    sent = [row for row in state.ledger.uploads if row.up_bytes]
    assert len(sent) == 7 * rounds
    assert {row.stage for row in sent} == ({"registration", STATISTICS} if rounds == 2 else {STATISTICS})


@pytest.mark.parametrize(("method", "stages"), GRADIENT.values(), ids=GRADIENT.keys())
def test_uploads_of_the_methods_that_train_are_admitted_in_every_stage(method, stages):
    """Rounded most; in float32: conformance/test_uploads.py."""
    tasks = image_tasks(np.random.default_rng(0), [3, 2, 2], SIZES)
    state = federation_of(method, tiny_context(wire="bfloat16"), tasks).run(lambda _: None)
    assert state.tasks_done == 3
    sent = [row for row in state.ledger.uploads if row.up_bytes]
    for task in range(3):
        found = {row.round: row.stage for row in sent if row.task == task}
        assert [found[round_] for round_ in range(len(stages))] == stages


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.9, None), (-0.9, None), (1.1, "above 1"), (-1.1, "below -1"), (torch.nan, "finite"), (-torch.inf, "finite")],
)
@pytest.mark.parametrize("rows", [1, 400])
def test_a_norm_out_of_range_says_nothing_of_the_values(value, said, rows):
    """The norm of 400 rows of 0.9 is 18; that of one row with one value is the value."""
    expected = {"W": real(rows, 1, least=-1, most=1), "free": real(2), "positive": real(1, least=0)}
    W = torch.full((rows, 1), 0.9)
    W[-1] = value
    found = first_objection({"W": W, "free": torch.full((2,), 1e30), "positive": torch.zeros(1)}, expected)
    assert found is None if said is None else found[0] == "W" and said in found[2].replace("no value ", "")
    refused = first_objection({"W": torch.zeros(rows, 1), "free": torch.ones(2), "positive": -torch.ones(1)}, expected)
    assert refused[0] == "positive"
    too_large = first_objection({"free": torch.full((2,), 1e30)}, {"free": real(2)}, largest=1e18)
    assert too_large[0] == "free"
