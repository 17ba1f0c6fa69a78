"""What uploads reveal of single samples: every method against a plain count of the clients' classes, and an attack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fcl_bench.engine.codec import Middleware
from fcl_bench.engine.single_sample_leakage import Grouped, Groups
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.closed_form.base import ClosedFormMethod
from fcl_bench.methods.closed_form.fedfecam import FedFeCAM
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.methods.closed_form.ranpac import RanPAC, fold_numbers, hash_factors
from fcl_bench.methods.closed_form.stsa_e import STSAE
from fcl_bench.methods.data_free import mfcl
from fcl_bench.methods.exemplars.fedicarl import FediCaRL
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.methods.projection.task_identity import Tip
from fcl_bench.protocol.fields import MOMENTS, SUMS
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Method
from fcl_bench.randomness import generator
from fcl_bench.training.knobs import Gaussian, Training
from tests.methods.harness import context_of
from tests.methods.training_harness import ImageTasks, federation_of, tiny_context
from tests.small_methods import NAMES, architecture, class_of, made, trains_by_gradient

FAST = Training(rounds=2, epochs=1, batch_size=8, lr=0.01, augment="none")
#: Of methods whose rounds reveal nothing.
ONCE = Training(rounds=1, epochs=1, batch_size=8, lr=0.01, augment="none")
SMALL = {
    "mfcl": {"generator": mfcl.Generation(width=8, noise=8, steps=2, batch_size=8), "synthetic": 8},
    # With nme: `test_a_lone_exemplar_is_told_after_every_task_and_counts_as_one_sample`.
    "fedicarl": {"classify": "softmax"},
}
#: [task][client] -> class: samples. Single samples of a class, a client with a single sample, a class that comes back.
HELD = [
    [{0: 5, 1: 1}, {2: 1}, {0: 4, 1: 3, 2: 1}, {}],
    [{1: 1, 3: 6}, {3: 1, 4: 5}, {4: 1}, {1: 2, 4: 2}],
]


def tasks_of(held=HELD, shape=(6,), seed: int = 0) -> ImageTasks:
    """Samples as `held` says: features of distinct directions, above 0, or images."""
    rng = np.random.default_rng(seed)

    def drawn(classes: dict[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        labels = np.repeat(list(classes), list(classes.values())).astype(np.int64)
        rng.shuffle(labels)
        if len(shape) == 1:
            return torch.from_numpy(rng.gamma(2, size=(len(labels), *shape))), torch.from_numpy(labels)
        pixels = rng.integers(0, 256, (len(labels), *shape)).astype(np.uint8)
        return torch.from_numpy(pixels), torch.from_numpy(labels)

    return [[drawn(classes) for classes in clients] for clients in held]


# The plain count ------------------------------------------------------------------------------------------------------


class Recorder(Middleware):
    """Keeps what came, as the server absorbs it, and the broadcasts that it answered."""

    def __init__(self) -> None:
        self.uploads: list[tuple[int, Message, Message]] = []

    def send(self, message: Message, client: int | None) -> Message:
        self.broadcast = message
        return message

    def receive(self, message: Message, client: int) -> Message:
        assert not message.groups
        self.uploads.append((client, message, self.broadcast))
        return message


@dataclass(frozen=True)
class Field:
    """Fields of uploads that are sums: of each class, of all of a client's samples, or of each sample."""

    level: str
    is_one: Callable[[str, torch.Tensor], bool]
    stage: str | None = None
    moment: bool = False


def sums(level: str, *names: str, stage: str | None = None) -> Field:
    return Field(level, lambda name, _: name in names, stage)


def moments(level: str, *names: str, stage: str | None = None) -> Field:
    return Field(level, lambda name, _: name in names, stage, moment=True)


def every(stage: str, prefix: str = "") -> Field:
    """Second moments of all samples: all fields of a stage whose names begin so, those without a column aside."""
    return Field("client", lambda name, tensor: name.startswith(prefix) and tensor.numel() > 0, stage, moment=True)


STSA_LIKE = (sums("class", "C"), moments("client", "G"))
#: What each method of conf/method reveals, said independently of its messages: () where it reveals nothing. Of a method
#: that is not here, only what its messages say is counted.
TOLD: dict[str, tuple[Field, ...]] = {
    **dict.fromkeys(("stsa", "air", "ranpac"), STSA_LIKE),
    "ds_al": (*STSA_LIKE, sums("client", "T")),
    "stsa_e": (),  # by groups: `test_groups_of_stsa_e`
    "afl": (sums("class", "W"), moments("client", "C")),
    "afcl": (sums("class", "W_known"), moments("client", "G")),
    "fedran": (sums("class", "B"), moments("client", "V")),
    "centred_sketch": (sums("class", "S"),),
    "gaussian_sketch": (sums("class", "S_z"),),
    "fedncm": (sums("class", "S"),),
    "fedlda": (sums("class", "S"), moments("client", "G")),
    "fedklda": (sums("class", "S"), moments("client", "G"), sums("client", "total", stage="bandwidth")),
    "fedfecam": (sums("class", "S", "T"), moments("class", "Q")),
    "centralised_ridge": (sums("sample", "Z"),),
    "centralised": (sums("sample", "images"),),
    "fedewc": (every("fisher"),),
    "fot": (every("bases"),),
    "fedprotip": (every("bases"), sums("client", "reference", stage="references")),
    "regmean": (every("model", "gram."),),
    "lorm": (every("model", "gram."), every("grams")),
    "pilora": (sums("class", "class_means"),),
    "fedspace": (sums("class", "prototypes"),),
    "lga": (sums("class", "sums", stage="radius"), moments("class", "squares", stage="radius")),
    "fedcbc": (sums("client", "low", "high", stage="range"),),
    **dict.fromkeys(("fedavg", "fedprox", "feddyn", "scaffold", "moon", "fedntd", "feddisco", "fedgen"), ()),
    **dict.fromkeys(("fedlwf", "fedicarl", "target", "lander", "mfcl", "glfc"), ()),
    **dict.fromkeys(("l2p", "dualprompt", "coda_prompt", "cprompt"), ()),
}


def declared(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts, in runs from here on, the groups of one sample in what is declared of clients' messages."""
    found = {"one_sample_sums": 0, "one_sample_moments": 0}

    of = Grouped.of

    def counting(given: Groups, samples: np.ndarray) -> Grouped:
        for key, kind in (("one_sample_sums", SUMS), ("one_sample_moments", MOMENTS)):
            for which in given[kind].values():
                groups = [0] * len(samples) if which is None else [group for group in which.tolist() if group >= 0]
                found[key] += sum(count == 1 for count in Counter(groups).values())
        return of(given, samples)

    monkeypatch.setattr(Grouped, "of", counting)
    return found


def counted(recorder: Recorder, fields: tuple[Field, ...], held=HELD) -> dict[str, int]:
    """Field by field, client by client, class by class."""
    found, told = {"one_sample_sums": 0, "one_sample_moments": 0}, set()
    for client, upload, _ in recorder.uploads:
        classes = held[upload.task][client]
        for name, tensor in upload.items():
            for field in fields:
                if not field.is_one(name, tensor) or field.stage not in (None, upload.stage):
                    continue
                key = "one_sample_moments" if field.moment else "one_sample_sums"
                if field.level == "sample":
                    found[key] += sum(classes.values())
                    told |= {(upload.task, client, c, i) for c, n in classes.items() for i in range(n)}
                elif field.level == "client" and sum(classes.values()) == 1:
                    found[key] += 1
                    told |= {(upload.task, client, *classes, 0)}
                elif field.level == "class":
                    single = {c for c, n in classes.items() if n == 1}
                    found[key] += len(single)
                    told |= {(upload.task, client, c, 0) for c in single}
    return {**found, "revealed_samples": len(told)}


def run(method: Method, tasks: ImageTasks, wire: str = "float64", vit: bool = False, **options) -> tuple:
    """What a run's ledger says, and what travelled."""
    recorder = Recorder()
    if tasks[0][0][0].dtype == torch.uint8:
        context = tiny_context(wire="float32", architecture="vit" if vit else "conv")
    else:
        context = context_of(tasks[0][0][0].shape[1], wire=wire, **options)
    federation = federation_of(method, context, tasks, middleware=[recorder])
    federation.run(lambda _: None)
    return federation.state.ledger.single_samples(), recorder, federation


def small(name: str) -> Method:
    """The method with few features and rounds."""
    if trains_by_gradient(name):
        return made(name, training=FAST if TOLD.get(name) else ONCE, **SMALL.get(name, {}))
    knobs = {"M": 8} if issubclass(class_of(name), ClosedFormMethod) else {}
    return made(name, **knobs, **({"rank": 4} if hasattr(class_of(name), "rank") else {}))


@pytest.mark.slow_cases("centralised_softmax", "cprompt", "fedcbc", "glfc", "lander", "lga", "lorm", "pilora")
@pytest.mark.parametrize("name", NAMES)
def test_every_method_reveals_what_a_plain_count_says(name, monkeypatch):
    said = declared(monkeypatch)
    vit = architecture(name) == "vit"
    trained = small(name).trains_network
    told, recorder, _ = run(small(name), tasks_of(shape=(3, 8, 8) if trained else (6,)), vit=vit)
    assert {key: told[key] for key in said} == said
    if name == "stsa_e" or name not in TOLD:
        return
    assert told == counted(recorder, TOLD[name])
    assert (told["revealed_samples"] > 0) is bool(TOLD[name])


@pytest.mark.slow_cases("centralised_softmax")
@pytest.mark.parametrize("name", [name for name in NAMES if not small(name).trains_network])
def test_the_wire_changes_no_count(name):
    tasks = tasks_of()
    plain, *_ = run(small(name), tasks)
    packed, *_ = run(small(name), tasks, "float16", gram="packed", columns="held", factors="int8")
    assert packed == plain


KNOBS = {
    "the features as they are": (FedRAN(M=None, rank=4), TOLD["fedran"]),
    "Tukey's power 1": (FedFeCAM(tukey=1), (sums("class", "S"), moments("class", "Q"))),
}


@pytest.mark.parametrize("name", KNOBS)
def test_knobs_change_what_is_sent(name):
    method, fields = KNOBS[name]
    told, recorder, _ = run(method, tasks_of())
    assert told == counted(recorder, fields)
    assert told["revealed_samples"]


@pytest.mark.slow
def test_moments_for_a_head_are_of_classes_of_which_enough_is_known():
    for covariance in ("full", "diagonal"):
        for least in (1, 2):
            method = FedAvg(training=FAST, ccvr="gaussian", gaussian=Gaussian(covariance, least=least))
            told, *_ = run(method, tasks_of(shape=(3, 8, 8)))
            single = sum(n == 1 for clients in HELD for classes in clients for n in classes.values())
            here = single if least == 1 else 0
            assert told == {"one_sample_sums": here, "one_sample_moments": here, "revealed_samples": here}


@pytest.mark.parametrize("wire", ["task", "held"])
def test_groups_of_stsa_e(wire):
    """What the server itself reads off the counts that come with the sums."""
    told, recorder, _ = run(STSAE(M=8, dummy_clients=4), tasks_of(), columns=wire)
    alone = sum(int((upload["n"] == 1).sum()) for _, upload, _ in recorder.uploads)
    assert alone > 8
    assert told == {"one_sample_sums": alone, "one_sample_moments": 0, "revealed_samples": alone}


def test_folds_of_ranpac():
    tasks = tasks_of()
    told, *_ = run(RanPAC(M=8, ridge="held_out"), tasks)
    factors = hash_factors(generator(0, "folds"), 6)
    found, moments_found, samples = 0, 0, set()
    for t, clients in enumerate(tasks):
        for k, (Z, labels) in enumerate(clients):
            part = fold_numbers(Z, factors, 5).clamp_max(1)
            for p in range(2):
                own = torch.nonzero(part == p).squeeze(1).tolist()
                moments_found += len(own) == 1
                alone = [i for i in own if sum(labels[j] == labels[i] for j in own) == 1]
                found += len(alone)
                samples |= {(t, k, i) for i in alone + (own if len(own) == 1 else [])}
    assert moments_found
    assert told == {"one_sample_sums": found, "one_sample_moments": moments_found, "revealed_samples": len(samples)}


def test_references_that_are_updated_are_of_kept_samples_too():
    """Client 0 has a single sample of the first task, whose reference it sends again after the second."""
    held = [[{0: 1}, {0: 4, 1: 3}], [{2: 3, 3: 2}, {2: 1}]]
    tip = Tip(references="updated")
    told, recorder, _ = run(FedProTIP(training=FAST, tip=tip), tasks_of(held, (3, 8, 8)))
    references = {(c, upload.task) for c, upload, _ in recorder.uploads if upload.stage == "references"}
    assert references == {(0, 0), (1, 0), (0, 1), (1, 1)}
    assert told["one_sample_sums"] == 1 + 2  # of client 0 in both tasks, and of client 1 in the second
    assert told["revealed_samples"] == 2


def test_a_lone_exemplar_is_told_after_every_task_and_counts_as_one_sample():
    held = [[{0: 1, 1: 4}, {0: 5}], [{2: 5}, {2: 1, 3: 6}], [{0: 2}, {4: 3}]]
    method = FediCaRL(training=FAST, classify="nme", memory=60)
    told, recorder, _ = run(method, tasks_of(held, (3, 8, 8)))
    plain = sum(int((m["counts"] == 1).sum()) for _, m, _ in recorder.uploads if "counts" in m)
    # Class 0 of client 0 after two tasks, until its samples of the third are beside it; class 2 of client 1 after two.
    assert plain == told["one_sample_sums"] == 4
    assert told["revealed_samples"] == 2
