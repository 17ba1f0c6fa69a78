"""The benchmark suite: its plain code gives the library's results, its tables and comparisons say what was measured."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import compare
import gpu_lines
import pytest
import table as table_command
import torch
from suite import children, lines, made, peers, results, table
from suite.bench_methods import METHODS, learned, plain_task
from suite.bench_stsa_e_server import joined, one_task
from suite.sides import Beside, case_name, each, limit, ours, peer

from fcl_bench.linalg.spectral import merge, summarise
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.methods.closed_form.stsa_e import STSAE
from fcl_bench.protocol.problem import Problem
from fcl_bench.protocol.wire import WireFormat
from tests.conftest import REPOSITORY, write_features

CPU = torch.device("cpu")
SUITE = REPOSITORY / "benchmarks" / "suite"
SIZES = SimpleNamespace(n=30, d=8, M=20, r=20, K=3, C=4)


def exact(inputs: int) -> Problem:
    """A problem whose wire rounds nothing."""
    return dataclasses.replace(made.problem(inputs, torch.float64), wire=WireFormat(torch.float64))


def shards_of(case: SimpleNamespace) -> list:
    return [made.shard(case.n, case.d, case.C, torch.float64, client=client) for client in range(case.K)]


def close(ours_: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours_, theirs, rtol=1e-8, atol=1e-9 * float(theirs.abs().max()))


def gram_of(sketch) -> torch.Tensor:
    V, sigma = sketch
    return (V * sigma.square()) @ V.T


@pytest.mark.parametrize("method", ["stsa", "afl", "afcl", "fedran", "joint"])
def test_a_task_in_plain_code_gives_the_same_classifier(method):
    case = SimpleNamespace(method=method, **vars(SIZES))
    known, shards = exact(case.d), shards_of(case)
    side = plain_task(case, shards, known)
    assert side is not None
    server = learned(METHODS[method](case), known, shards, case.C)
    close(server.model()["W"], side.prepare()())


def test_rank_one_updates_give_stsa_es_gram_matrix():
    method, known = STSAE(M=20, dummy_clients=3), exact(8)
    sent = made.uploads(method, known, shards_of(SIZES), made.task(SIZES.C))
    server = method.server(known)
    one_task(server, sent, SIZES.C)
    close(server.estimate.matrix, peers.scatter(*joined(sent)))


def test_a_share_of_the_rank_one_updates_is_the_first_of_them():
    C, n = torch.rand(6, 5, 2, dtype=torch.float64), torch.randint(1, 9, (5, 2))
    first = (int(n[:, 0].sum()) - 1) / 4
    three = sum(first * torch.outer(C[:, j, 0], C[:, j, 0]) / int(n[j, 0]) for j in range(3))
    close(peers.scatter(C, n, 3), three)


def test_groups_summed_by_sample_are_what_a_client_sends():
    method, known = STSAE(M=20, dummy_clients=3), exact(8)
    shard = shards_of(SIZES)[0]
    (sent,) = made.uploads(method, known, [shard], made.task(SIZES.C))
    C, n = joined([sent])
    H = peers.random_features(shard.inputs, made.problem_projection(known, 20))
    # Into whichever groups the samples fall, their sums and counts add up to the classes'.
    plain, counts = peers.group_sums(H, shard.labels, torch.arange(30) % 3, 3, SIZES.C)
    close(C.sum(dim=1), plain.sum(dim=1))
    assert torch.equal(n.sum(dim=0), counts.sum(dim=0))
    close(plain.sum(dim=1), peers.class_sums(H, shard.labels, SIZES.C))


@pytest.mark.parametrize("n", [15, 40])
def test_the_svd_gives_the_summary(n):
    H = made.random_features(n, 8, 20, torch.float64)
    close(gram_of(summarise(H, 6)[0]), gram_of(peers.summary(H, 6)))


def test_the_papers_merge_gives_ours():
    first, second = made.spectra(2, 30, 6, torch.float64)
    close(gram_of(merge([first, second], 6)[0]), gram_of(peers.merge(first, second, 6)))


def test_an_inverse_for_every_client_gives_afls_classifier():
    method, known = AFL(), exact(8)
    sent = made.uploads(method, known, shards_of(SIZES), made.task(SIZES.C))
    server = method.server(known)
    server.start_task(made.task(SIZES.C))
    for client, message in enumerate(sent):
        server.absorb(client, message)
    server.finish_task()
    theirs = peers.aggregated([(one["C"], one["W"]) for one in sent], method.gamma)
    assert theirs is not None
    close(server.W, theirs)


def test_the_pairwise_update_of_the_paper_is_an_inverse_for_every_client():
    method = AFL()
    sent = made.uploads(method, exact(8), shards_of(SIZES), made.task(SIZES.C))
    inverse = peers.aggregated([(one["C"], one["W"]) for one in sent], method.gamma, last=False)
    pairwise = peers.weighted([(one["C"], torch.linalg.inv(one["C"]), one["W"]) for one in sent])
    assert inverse is not None
    assert pairwise is not None
    close(pairwise, inverse)


def test_plain_scores_are_the_servers():
    known = exact(8)
    server = learned(STSA(M=20), known, shards_of(SIZES), SIZES.C)
    Z = made.features(300, 8, 4, torch.float64, seed=9)
    close(server.predict(Z), peers.predict(Z, server.model()["projection"], server.W))


class Pedantic:
    """pytest-benchmark's fixture as far as `Beside` uses it."""

    def __init__(self) -> None:
        self.extra_info: dict = {}
        self.group = None
        self.stats = SimpleNamespace(stats=SimpleNamespace(data=[]))

    def pedantic(self, target, setup, rounds, warmup_rounds):
        for _ in range(warmup_rounds + rounds):
            setup()
            target()
        self.stats.stats.data = [1.0] * rounds


def test_sides_take_turns_and_only_measured_rounds_are_kept():
    calls = []
    fixture = Pedantic()
    beside = Beside(fixture, "stage", {"n": 3, "dtype": "float32"}, CPU, rounds=2, warmup=1)
    beside(
        ours("a", each(lambda: calls.append("ours"))),
        limit("b", each(lambda: calls.append("limit"))),
        peer("c", each(lambda: calls.append("peer"))),
        values={"error": 0.5},
    )
    assert calls == ["limit", "ours", *["limit", "peer", "ours"] * 2]
    told = fixture.extra_info
    assert (told["name"], told["values"]) == ("stage: n=3 float32", {"error": 0.5})
    assert [(side["role"], len(side["seconds"]), len(side["processor"])) for side in told["sides"]] == [
        ("ours", 2, 2),
        ("limit", 2, 2),
        ("peer", 2, 2),
    ]
    json.dumps(told)


def test_a_share_is_scaled_to_the_whole():
    side = peer("c", each(lambda: sum(range(200_000))), share=0.01)
    side.time(CPU)
    whole = peer("c", each(lambda: sum(range(200_000))))
    whole.time(CPU)
    assert side.processor[0] > 20 * whole.processor[0]


def entry(stage: str = "statistics", case: dict | None = None, **changes) -> dict:
    """One benchmark as pytest-benchmark writes it, with three rounds."""
    rounds = {"ours": [2.0, 4.0, 3.0], "limit": [1.0, 2.0, 2.0], "peer": [20.0, 80.0, 30.0]}
    words = {"ours": ("ours", 1, 30.0), "limit": ("bare", 1, 20.0), "peer": ("plain", 0.1, None)}
    sides = []
    for role, (what, share, flops) in words.items():
        told = {"role": role, "what": what, "share": share, "flops": flops}
        sides.append({**told, "seconds": rounds[role], "processor": [1.0, 1.0, 1.0]})
    case = {"n": 10000, "d": 512, "M": 5000, "C": 10, "dtype": "float64"} if case is None else case
    info = {"name": case_name(stage, case), "stage": stage, "sizes": case, "sides": sides, "values": {}, **changes}
    return {"name": f"bench_{stage}", "extra_info": info}


def result(*entries: dict) -> dict:
    machine = {"cpu": {"brand_raw": "A CPU"}}
    return {"machine_info": machine, "commit_info": {"id": "c" * 40}, "benchmarks": list(entries)}


def slower(one: dict, factor: float) -> dict:
    """The same benchmark with ours slower."""
    one = copy.deepcopy(one)
    first = one["extra_info"]["sides"][0]
    first["seconds"] = [factor * second for second in first["seconds"]]
    return one


def test_ratios_are_medians_over_rounds():
    (case,) = results.of_json(result(entry()), "made").cases.values()
    (bare,), (plain,) = case.beside("limit"), case.beside("peer")
    assert case.ours.median == 3
    assert results.ratio(case.ours, bare) == 2  # of 2, 2 and 1.5, not 3 / 2
    assert results.ratio(plain, case.ours) == 10
    assert results.rate_ratio(case.ours, bare) == 0.75
    assert results.rate_ratio(plain, case.ours) is None


def test_the_table_has_every_side_a_mark_and_the_lines():
    text = table.markdown(results.of_json(result(entry(), entry("solve", {"M": 5, "C": 2})), "made"))
    assert "A CPU" in text
    assert "commit cccccccccccc," in text
    row = "3 s | 2 s (bare) | 2.00 | 75 % | 30 s\\* (plain) | 10.0 |"
    assert f"| statistics | n=10000 d=512 M=5000 C=10 float64 | {row}" in text
    assert "| solve | M=5 C=2 | 3 s |" in text
    line = "| statistics: n=10000 d=512 M=5000 C=10 float64 | ≥ 70 % of the limit's rate | 75 % | yes |"
    assert line in text
    assert "1 of 1 lines hold; not measured: " in text


def test_a_line_that_does_not_hold_is_told():
    (checked,) = [one for one in lines.check(results.of_json(result(slower(entry(), 1.5)), "made")) if one.measured]
    assert (checked.measured, checked.holds) == (0.5, False)
    assert "| 50 % | **no** |" in table.markdown(results.of_json(result(slower(entry(), 1.5)), "made"))


@pytest.mark.parametrize(
    ("kind", "beside", "bound", "measured"),
    [("limit", "", 2, 2), ("peer", "plain", 10, 10), ("seconds", "", 3, 3), ("value", "error", 1e-6, 1e-7)],
)
def test_a_line_takes_its_measurement_where_it_says(kind, beside, bound, measured):
    (case,) = results.of_json(result(entry(values={"error": 1e-7})), "made").cases.values()
    line = lines.Line(case.name, kind, bound, beside)
    assert line.measured(case) == pytest.approx(measured)
    assert line.holds(measured)
    assert not line.holds(measured * (0.5 if line.at_least else 100))
    assert lines.Line(case.name, kind, bound, "no such").measured(case) is None or kind == "seconds"


def cases_of_the_suite() -> dict[str, str]:
    """The names of all cases, and the stage of each."""
    names = {}
    for file in sorted(SUITE.glob("bench_*.py")):
        module = importlib.import_module(f"suite.{file.stem}")
        for name, function in vars(module).items():
            for cases in getattr(function, "cases", {}).values():
                stage = name.removeprefix("bench_")
                names.update({case_name(stage, case): stage for case in cases})
    return names


def test_every_line_has_its_case():
    names = cases_of_the_suite()
    assert [line.case for line in lines.LINES if line.case not in names] == []


def written(path: Path, content: dict) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_comparing_tells_what_became_slower(tmp_path, capsys):
    other = entry("solve", {"M": 5, "C": 2})
    old = written(tmp_path / "old.json", result(entry(), other))
    assert compare.main([str(old), str(old)]) == 0
    assert "| same |" in capsys.readouterr().out
    # All sides alike: another machine.
    doubled = copy.deepcopy(result(entry(), other))
    for one in doubled["benchmarks"]:
        for side in one["extra_info"]["sides"]:
            side["seconds"] = [2 * second for second in side["seconds"]]
    assert compare.main([str(old), str(written(tmp_path / "slow.json", doubled))]) == 0
    new = written(tmp_path / "new.json", result(slower(entry(), 1.6), other))
    capsys.readouterr()
    assert compare.main([str(old), str(new)]) == 1
    out = capsys.readouterr().out
    assert "C=10 float64 | bare | 2.00 | 3.20 | 1.60 | **slower** |" in out
    assert "| solve: M=5 C=2 | bare | 2.00 | 2.00 | 1.00 | same |" in out
    assert compare.main([str(old), str(new), "--tolerance", "0.7"]) == 0
    assert compare.main([str(new), str(old)]) == 0
    assert "| faster |" in capsys.readouterr().out


def test_a_case_that_is_gone_fails_and_a_new_one_does_not(tmp_path, capsys):
    both = written(tmp_path / "both.json", result(entry(), entry("solve", {"M": 5, "C": 2})))
    one = written(tmp_path / "one.json", result(entry()))
    assert compare.main([str(both), str(one)]) == 1
    assert "**missing**" in capsys.readouterr().out
    assert compare.main([str(one), str(both)]) == 0
    assert "| new |" in capsys.readouterr().out


def without(key: str) -> dict:
    one = entry()
    del one["extra_info"][key]
    return result(one)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "no machine_info or benchmarks"),
        (result(), "has no case"),
        (without("name"), "benchmark 'bench_statistics' is none of the suite's: no 'name'"),
        (without("sides"), "no 'sides'"),
        (result(entry(), entry()), "twice"),
        (result(entry(sides=[])), "ours first"),
        (result(slower(entry(), 0)), "lacks seconds"),
    ],
)
def test_a_file_that_is_no_result_is_refused_in_one_line(tmp_path, capsys, content, said):
    good = written(tmp_path / "good.json", result(entry()))
    bad = tmp_path / "bad.json"
    bad.write_text(content if isinstance(content, str) else json.dumps(content))
    assert compare.main([str(good), str(bad)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("compare: error: ")
    assert (said in error, error.count("\n"), str(bad) in error) == (True, 1, True)
    assert table_command.main([str(bad)]) == 2


def test_files_without_a_common_case_cannot_be_compared(tmp_path, capsys):
    files = [written(tmp_path / f"{M}.json", result(entry("solve", {"M": M, "C": 2}))) for M in (5, 6)]
    assert compare.main([*map(str, files)]) == 2
    assert compare.main([str(files[0]), str(tmp_path / "absent.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> tuple[Path, str]:
    """The JSON and the output of the suite at its smallest, in a process of its own."""
    folder = tmp_path_factory.mktemp("bench")
    file = folder / "made" / "smoke.json"
    # What needs timm or starts processes takes longer than all others together.
    slow = ("extraction", "memory", "whole_run")
    ignored = [f"--ignore={SUITE / f'bench_{name}.py'}" for name in slow]
    options = ["--size", "smoke", "--rounds", "2", f"--benchmark-json={file}"]
    # One that took itself for a worker of these tests' would not measure.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(SUITE), *ignored, *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return file, done.stdout


def test_the_suite_runs_and_writes_its_table(smoke, capsys):
    file, out = smoke
    found = results.load(file)
    stages = set(cases_of_the_suite().values())
    elsewhere = {"extraction", "memory_fedran", "memory_clients", "whole_run", "start_up"}
    assert {case.stage for case in found.cases.values()} == stages - elsewhere
    assert all(len(case.ours.seconds) == 2 for case in found.cases.values())
    ours_ = found.machine["fcl_bench"]
    assert (ours_["size"], ours_["threads"] >= 1, ours_["torch"]) == ("smoke", True, torch.__version__.split("+")[0])
    text = file.with_suffix(".md").read_text()
    assert text == table.markdown(found)
    assert text in out
    assert "warning" not in out.lower()
    assert table_command.main([str(file)]) == 0
    assert capsys.readouterr().out == text
    assert compare.main([str(file), str(file)]) == 0


def test_every_line_names_a_side_that_its_stage_has(smoke):
    """By the smallest case of the stage."""
    stages = cases_of_the_suite()
    smallest = {case.stage: case for case in results.load(smoke[0]).cases.values()}
    checked = 0
    for line in lines.LINES:
        case = smallest.get(stages[line.case])
        if case is not None:
            assert line.measured(case) is not None, line
            checked += 1
    assert checked > 10


def test_the_gpu_script_runs_on_a_cpu(tmp_path, monkeypatch, capsys):
    extraction = gpu_lines.Measured("extraction", 0.1, gpu_lines.EXTRACTION, True)
    monkeypatch.setattr(gpu_lines, "extraction", lambda *_: [extraction])
    assert gpu_lines.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "gpu-lines-cpu.json").read_text())["lines"]
    assert len(told) == 1 + 2 + len(METHODS)
    assert [line["holds"] for line in told if "scores" in line["what"]] == [True] * len(METHODS)
    assert "| extraction | ≥ 0.8 | 0.1 | **no** |" in capsys.readouterr().out


def test_scores_that_disagree_fail_on_any_device(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_lines, "extraction", lambda *_: [])
    monkeypatch.setattr(gpu_lines, "statistics", lambda *_: [])
    apart = gpu_lines.Measured("scores", 2e-6, gpu_lines.AGREEMENT, False)
    monkeypatch.setattr(gpu_lines, "agreement", lambda *_: [apart])
    assert gpu_lines.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1


def test_the_command_of_a_whole_run_runs(tmp_path, command, no_pictures):
    features = write_features(tmp_path / "features.npz")
    first, *arguments = children.whole_run(features, tmp_path / "out", "method=afl", "tasks=2")
    assert Path(first).is_file()
    assert command(*arguments)[0] == 0
    assert len(list((tmp_path / "out" / "runs").glob("afl-*/run.json"))) == 1


def test_the_peak_is_the_childs_and_not_this_process_s():
    held = torch.ones(2**26)  # 256 MiB here, and nothing there
    small = children.peak_gib(children.python("pass"))
    large = children.peak_gib(children.python("x = bytearray(200 * 2**20); x[::4096] = bytes(len(x[::4096]))"))
    assert held.numel() == 2**26
    assert small < 0.1
    assert large - small == pytest.approx(200 / 1024, rel=0.1)


def test_a_command_that_fails_says_why():
    with pytest.raises(RuntimeError, match="exit code 1[\\s\\S]*ZeroDivisionError"):
        children.run(*children.python("1 / 0"))
