"""Runs over secure sums: clients that drop out, bytes, what single samples remain to be seen, and resumed runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.engine.single_sample_leakage import Grouped, revealed
from fcl_bench.errors import UserError
from fcl_bench.execution.screen import print_record
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.closed_form.afcl import AFCL
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.fedncm import FedNCM
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.options.faults.choices import ListedFaults, RandomFaults
from fcl_bench.options.secure.aggregation import peers_of
from fcl_bench.options.secure.base import SecureSums
from fcl_bench.protocol.method import EVERYONE
from fcl_bench.results.collect import collect
from fcl_bench.training.knobs import Training
from tests.engine.secure.summing import federation
from tests.methods.whole_runs import assert_resumes
from tests.small_runs import run_in, settings_for

SHORT = Training(rounds=3, epochs=1, batch_size=8, lr=0.05, augment="none")
#: 10 clients, 3 tasks of 2 classes.
TEN = [[8] * 10, [6] * 10, [7] * 10]
THREE_DROP_OUT = ListedFaults(silent=["1@0", "4@0", "9@0", "0@1", "2@1", "3@1", "5@2", "6@2", "7@2"])


def learnt(method, secure, faults=None, sizes=TEN, gram="full"):
    found = federation(method, secure, faults, sizes, gram)
    found.run(lambda _: None)
    return found


def rows_of(run):
    return {(row.task, row.round, row.client): row for row in run.state.ledger.uploads}


@pytest.mark.parametrize("gram", ["full", "packed"])
@pytest.mark.parametrize("method", [STSA(M=8, gamma=1.0), AFL()], ids=["stsa", "afl"])
def test_of_ten_clients_three_drop_out_and_w_is_that_of_the_seven(method, gram):
    secure = SecureSums(fraction_bits=20)
    plain = learnt(method, None, THREE_DROP_OUT, gram=gram).server
    summed = learnt(method, secure, THREE_DROP_OUT, gram=gram).server
    apart = 7 * len(TEN) * secure.step / 2  # of each entry of the sums over three tasks
    G, B = plain.estimate.matrix, plain.B
    change_G, change_B = summed.estimate.matrix - G, summed.B - B
    assert 0 < float(change_G.abs().max()) <= apart * (1 + 1e-6)
    assert 0 < float(change_B.abs().max()) <= apart * (1 + 1e-6)
    assert plain.uploads == summed.uploads == 21
    # (S + E) (W + D) = B + F, so ||D|| <= (||F|| + ||E|| ||W||) / (smallest eigenvalue of S - ||E||).
    shift = plain.offset() + plain.ridge
    least = float(torch.linalg.eigvalsh(G)[0]) + shift
    errors = [apart * side**0.5 * len(G) ** 0.5 for side in (len(G), B.shape[1])]
    bound = (errors[1] + errors[0] * float(torch.linalg.matrix_norm(plain.W, 2))) / (least - errors[0])
    assert least > 10 * errors[0]
    assert float(torch.linalg.matrix_norm(summed.W - plain.W, 2)) <= bound < 0.01


def test_fewer_than_t_are_one_line():
    faults = ListedFaults(silent=[f"{client}@1" for client in range(5)])
    with pytest.raises(UserError, match=r"secure=sums: 5 of 10 clients answered in task 1, round 0, and it takes 6"):
        learnt(STSA(M=8), SecureSums(), faults)


def test_clients_that_are_gone_have_no_keys():
    run = learnt(STSA(M=8, gamma=1.0), SecureSums(), ListedFaults(gone=["3@1", "4@1", "5@1", "6@1", "7@1"]))
    rows = rows_of(run)
    assert rows[1, 0, 3].lost
    assert rows[1, 0, 3].up_bytes == rows[1, 0, 3].down_bytes == 0
    assert run.server.uploads == 10 + 5 + 5


def test_a_late_upload_is_lost():
    """As if it had never been sent: its masks are taken out when it is missing."""
    late = learnt(STSA(M=8, gamma=1.0), SecureSums(), ListedFaults(late=["2@0", "8@0"]))
    silent = learnt(STSA(M=8, gamma=1.0), SecureSums(), ListedFaults(silent=["2@0", "8@0"]))
    assert torch.equal(late.server.W, silent.server.W)
    assert late.state.absences["late_arrived"] == 2
    assert late.state.absences["late_absorbed"] == 0
    rows = rows_of(late)
    assert [rows[0, 0, client].late for client in (2, 8, 3)] == [1, 1, 0]
    assert rows[0, 0, 2].up_bytes == rows[0, 0, 3].up_bytes - 32 * 10, "no share for the unmasking"


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("neighbours", [None, 4])
@pytest.mark.parametrize("gram", ["full", "packed"])
def test_bytes_are_those_of_the_formula(bits, neighbours, gram):
    """docs/explanation/secure_sums.md: per client, k peers, E numbers, s survivors among its k + 1 holders."""
    d, classes, n = 6, 2, 10
    secure = SecureSums(bits=bits, fraction_bits=8, neighbours=neighbours, threshold=0.4)
    run = learnt(AFL(), secure, ListedFaults(silent=["1@0", "4@0"], late=["9@0"]), gram=gram)
    rows, plain = rows_of(run), rows_of(learnt(AFL(), None))
    for task in range(3):
        peers = peers_of(list(range(n)), neighbours, 0, task, 0)
        missing = {1, 4, 9} if task == 0 else set()
        for client in range(n):
            k = len(peers[client])
            assert k == (9 if neighbours is None else neighbours)
            numbers = (d * (d + 1) // 2 if gram == "packed" else d * d) + d * classes
            survivors = len({client, *peers[client]} - missing)
            up, down = 64 + 80 * k, 4 + 68 * k + 84 * k
            if client not in missing or client == 9:
                up, down = up + numbers * bits // 8, down + plain[task, 0, client].down_bytes
            if client not in missing:
                up, down = up + 32 * (k + 1), down + 4 * survivors
            row = rows[task, 0, client]
            assert (row.up_bytes, row.down_bytes) == (up, down), (task, client)


@pytest.mark.slow
def test_samples_of_a_gradient_method_are_one_number_more():
    run = learnt(FedAvg(trains="features", training=SHORT), SecureSums())
    weights = 6 * 2 + 2  # of the first task's head
    assert rows_of(run)[0, 0, 0].up_bytes == 64 + 80 * 9 + 8 * (weights + 1) + 32 * 10


def test_registration_travels_as_it_is():
    """AFCL's first round has to tell the clients apart; its second does not."""
    run, plain = (rows_of(learnt(AFCL(), secure)) for secure in (SecureSums(), None))
    assert all(run[0, 0, client].up_bytes == plain[0, 0, client].up_bytes == 8 for client in range(10))
    assert run[0, 1, 0].up_bytes == 64 + 80 * 9 + 8 * (36 + 12) + 32 * 10


def test_numbers_that_could_wrap_around_end_the_run():
    with pytest.raises(UserError, match=r"client 0's G in task 0, round 0 \(statistics\) holds .* 10 clients"):
        learnt(STSA(M=8), SecureSums(bits=32, fraction_bits=26))


@pytest.mark.slow_cases("fedavg")
@pytest.mark.parametrize(
    "method", [STSA(M=8, gamma=1.0), FedAvg(trains="features", training=SHORT)], ids=["stsa", "fedavg"]
)
def test_a_resumed_run_is_the_same(method):
    faults = RandomFaults(silent=0.2, late=0.1)
    assert_resumes(lambda: federation(method, SecureSums(threshold=0.3), faults, TEN))


@pytest.mark.slow
def test_the_sums_do_not_depend_on_the_masks():
    """Nor on who shares masks with whom: they are exact."""
    ends = [learnt(STSA(M=8, gamma=1.0), SecureSums(neighbours=k)).server.W for k in (None, 4, 8)]
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_the_server_sees_one_message_per_round(monkeypatch):
    seen = []
    run = federation(FedNCM(), SecureSums(), None, TEN)
    absorb = run.server.absorb

    def watched(client, upload):
        seen.append((client, upload.clients))
        absorb(client, upload)

    monkeypatch.setattr(run.server, "absorb", watched)
    run.run(lambda _: None)
    assert seen == [(EVERYONE, 10)] * 3
    assert int(run.server.n.sum()) == sum(map(sum, TEN))


# What single samples are seen -----------------------------------------------------------------------------------------


def test_a_lone_sample_hides_among_those_of_others_and_no_other_does():
    """Three clients; sum 0 has two samples, 1 and 2 one each, sample 3 is in none."""
    which = [np.array([0, 1]), np.array([0, -1]), np.array([2])]
    found = revealed({k: Grouped({"S": own}, {}, np.arange(len(own))) for k, own in enumerate(which)})
    assert {client: alone.sums for client, alone in found.items()} == {0: 1, 1: 0, 2: 1}
    assert {client: alone.samples.tolist() for client, alone in found.items()} == {0: [1], 1: [], 2: [0]}
    assert all(alone.moments == 0 for alone in found.values())


def told(method, sizes, secure, faults=None):
    ledger = learnt(method, secure, faults, sizes).state.ledger
    return tuple(ledger.single_samples().values())


def test_counts_of_single_samples_are_of_the_sum():
    """The first task: two clients of one sample each. The second: one client alone, with one sample of each class."""
    sizes = [[1, 1, 6], [2, 0, 0]]
    plain, summed = told(STSA(M=8), sizes, None), told(STSA(M=8), sizes, SecureSums())
    assert plain[0] >= 4
    assert plain[1] == 2
    assert summed == (2, 0, 2), "of the client that is alone in its round"


def test_one_sample_of_a_class_among_all_clients_is_seen_still():
    """Only one of the clients has the class, and one sample of it: the sum is that sample."""
    plain, summed = (told(FedNCM(), [[1, 1]], secure) for secure in (None, SecureSums()))
    assert plain == summed == (2, 0, 2)


def test_whoever_drops_out_reveals_nothing():
    sizes = [[1, 4, 5, 6]]
    assert told(STSA(M=8), sizes, None)[1] == 1
    faults = ListedFaults(late=["0@0"])
    assert told(STSA(M=8), sizes, SecureSums(threshold=0.5), faults) == (0, 0, 0)


# The configuration ----------------------------------------------------------------------------------------------------


def test_masks_are_part_of_a_runs_identity(tmp_path):
    assert settings_for(tmp_path, "method=afl").identity()["secure"] == {"choice": "none"}
    chosen = settings_for(tmp_path, "method=afl", "secure=sums").identity()["secure"]
    assert chosen == {"choice": "sums", "bits": 64, "fraction_bits": 24, "threshold": 0.6, "neighbours": None}


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["clients=1"], "secure=sums with clients=1"),
        (["on_bad_upload=drop"], "on_bad_upload=drop with secure=sums"),
        (["wire.columns=held"], "wire.columns=held with secure=sums"),
        (["method=fedran"], "secure=sums: the server of method=fedran needs each client's V by itself"),
        (["secure.bits=48"], "secure.bits=48 is no width"),
        (["secure.bits=32", "secure.fraction_bits=31"], "secure.fraction_bits=31 leaves no room"),
        (["secure.neighbours=3"], "secure.neighbours=3 is odd"),
        (["secure.threshold=0"], "secure.threshold=0"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_is_one_line(tmp_path, overrides, line):
    with pytest.raises(UserError, match=line):
        run_in(tmp_path, "method=afl", "secure=sums", *overrides)
    assert not list(tmp_path.glob("runs/*"))


def test_a_whole_run(tmp_path, capsys):
    small = ("method=afl", "data=digits", "clients=3", "tasks=2", "wire.dtype=float64")
    summed, plain = run_in(tmp_path, *small, "secure=sums").record, run_in(tmp_path, *small).record
    assert (summed["secure"], plain["secure"]) == ("simulated sums", "none")
    assert summed["run_id"] != plain["run_id"]
    print_record(summed, "here")
    shown = capsys.readouterr().out
    assert "simulated sums: of each round's" in " ".join(shown.split())
    assert "secure" not in shown
    assert sorted(collect(tmp_path / "runs")["secure"]) == ["none", "simulated sums"]
    assert summed["metrics"] == plain["metrics"]
    assert summed["communication"]["up_total_bytes"] > plain["communication"]["up_total_bytes"]
