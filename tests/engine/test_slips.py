"""A slip in a method of one's own: docs/how-to/adding.md with one thing wrong is one line, exit 2, no folder."""

from __future__ import annotations

import pytest
import torch

from fcl_bench.engine.loop import participants_of
from fcl_bench.errors import UserError
from fcl_bench.protocol.method import Client, Server
from tests.own_methods import WRITTEN, own_method
from tests.test_adding import TRAINING, block_with

CLOSED_FORM = WRITTEN
TRAINED = block_with("class MemoryClient(")
UPLOAD = '"C": sums}'
#: Stands before a method of the server half.
ABSORB = "    def absorb(self, client, upload):"


def server_has(name: str, arguments: str, returned: str) -> tuple[str, str]:
    """One more method of the server half."""
    return ABSORB, f"    def {name}(self{arguments}):\n        return {returned}\n\n{ABSORB}"


def classifies(returned: str) -> tuple[str, str]:
    """What the server half answers, of its class `scores`."""
    return ABSORB, (
        "    def classify(self, batch):\n        from fcl_bench.protocol.context import Prediction\n"
        f"        scores = self.predict(batch.inputs)\n        return {returned}\n\n{ABSORB}"
    )


#: What stands in the page, what an author wrote in its place -> what the one line must hold.
CLOSED_FORM_SLIPS = {
    "no state": (
        ("samples=samples), state", "samples=samples)"),
        "MyClient.update returned a Message (the upload and the new state: return",
    ),
    "state is None": (
        ("samples=samples), state", "samples=samples), None"),
        "MyClient.update: the state is None (a mapping of names to",
    ),
    "number kept": (
        ("samples=samples), state", "samples=samples), {'seen': 3}"),
        "the state has seen, which is an int (a tensor, such as",
    ),
    "array sent": (
        (UPLOAD, '"C": sums.numpy()}'),
        "the message has C, which is an array (16, 5) of float64 (a tensor",
    ),
    "NaN sent": (
        (UPLOAD, '"C": sums / 0 * 0}'),
        "client 0, task 0, round 0 (statistics): the upload's C is not finite (",
    ),
    "fewer groups": (
        ("samples=samples)", "samples=samples, groups={'C': which[1:]})"),
        "MyClient.update: groups: C is a Tensor",
    ),
    "not declared": (
        (UPLOAD, '"S": sums}'),
        "MyClient.update sent S, which `uploads` of the method does not declare (",
    ),
    "no message down": (
        server_has("broadcast", ", task, round_", "{}"),
        "MyServer.broadcast returned a dict (a Message",
    ),
    "shape alone": (
        ('{"G": G, "C": C}', '{"G": G, "C": "M c"}'),
        "MyMethod.uploads: C of the stage statistics is a str (a field, such as",
    ),
    "unknown client": (
        server_has("participants", ", *_", "[0, 77]"),
        "participants named the clients 0, 77 (some of 0",
    ),
    "client twice": (
        server_has("participants", ", *_", "[1, 1]"),
        "participants named the clients 1, 1 (some of 0 to 1,",
    ),
    "scores alone": (
        classifies("scores"),
        "MyServer.classify returned a Tensor (177, 5) of float64 (a Prediction, such",
    ),
    "other classes": (
        classifies("Prediction(scores[:, [0, 0, 1, 2, 3, 4]])"),
        "classify: scores is a Tensor (177, 6)",
    ),
    "turned": (
        classifies("Prediction(scores.T)"),
        "scores is a Tensor (5, 177) of float64 (floating-point numbers (177, 5)",
    ),
    "NaN scores": (classifies("Prediction(scores / 0)"), "MyServer: class scores after task 0 are not finite (finite"),
    "later task": (
        classifies("Prediction(scores, scores.argmax(1))"),
        "to 4 after task 0 (None, or int64 numbers (177,)",
    ),
    "task -1": (
        classifies("Prediction(scores, scores.argmax(1) * 0 - 1)"),
        "int64 -1 to -1 after task 0 (None, or int64",
    ),
    "number saved": (
        server_has("state_dict", "", "{'seen': 3}"),
        "seen, which a method gave to be saved, is of the type",
    ),
}


@pytest.mark.parametrize(("slip", "told"), CLOSED_FORM_SLIPS.values(), ids=CLOSED_FORM_SLIPS)
def test_a_slip_in_a_closed_form_method_is_one_line(slip, told, tmp_path, monkeypatch, command):
    refused(CLOSED_FORM, "MyMethod", "M: 16\nridge: 1.0\n", slip, told, tmp_path, monkeypatch, command)


TRAINED_SLIPS = {
    "nothing kept": (("return {**state,", "{**state,"), "MemoryClient.update: the state is None (a mapping of names"),
    "negative weight": (
        (
            "@dataclass",
            "from fcl_bench.methods.gradient.server import GradientServer\n\n"
            "class Odd(GradientServer):\n    def weight(self, client, upload):\n        return -1.0\n\n@dataclass",
        ),
        "Odd.weight of client 0 is -1.0 (a finite number, 0 or more)",
    ),
}


@pytest.mark.parametrize(("slip", "told"), TRAINED_SLIPS.values(), ids=TRAINED_SLIPS)
def test_a_slip_in_a_method_that_trains_is_one_line(slip, told, tmp_path, monkeypatch, command):
    code = TRAINED
    if "Odd" in slip[1]:
        code = code.replace("client_half = MemoryClient", "client_half = MemoryClient\n    server_half = Odd")
    refused(code, "Memory", "kept: 20\n", slip, told, tmp_path, monkeypatch, command, *TRAINING)


def refused(code, kind, knobs, slip, told, tmp_path, monkeypatch, command, *overrides):
    right, wrong = slip
    assert code.count(right) == 1
    shared = "_gradient" if kind == "Memory" else ""
    own_method(tmp_path, monkeypatch, code.replace(right, wrong), kind, knobs, shared)
    conf, out = ("--config-dir", str(tmp_path / "conf")), tmp_path / "out"
    status, _, err = command(*conf, "method=mine", "tasks=2", "clients=2", f"out={out}", *overrides)
    assert status == 2
    [line] = err.splitlines()
    assert line.startswith("fcl-bench: error: ")
    assert told in line
    assert not list(out.glob("runs/*/run.json"))


class ModelHolder(Client, Server):
    """Both halves; its methods are never called."""


ModelHolder.__abstractmethods__ = frozenset()


def test_participants_may_be_numpy_numbers_in_any_order():
    named = torch.tensor([2, 0]).numpy()
    assert participants_of(ModelHolder(), named, 3) == [2, 0]
    assert participants_of(ModelHolder(), [], 3) == []
    with pytest.raises(UserError, match="named the clients -1"):
        participants_of(ModelHolder(), [-1], 3)
