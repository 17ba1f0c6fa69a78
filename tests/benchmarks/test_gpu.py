"""The two commands of `make gpu`, and what is carried to a machine without network."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import training_throughput

from benchmarks.gpu import budget, carry, check, papers
from benchmarks.gpu.__main__ import main as which
from benchmarks.gpu.budget import CUT, DONE, FAILED, NOT_BEGUN, Budget
from fcl_bench.composition import composed
from fcl_bench.config import load_settings


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# Budget ---------------------------------------------------------------------------------------------------------------


def test_a_budget_says_what_became_of_each_command():
    plenty = Budget(5)
    assert plenty.run("right", python("")).state == DONE
    assert plenty.run("wrong", python("raise SystemExit(3)")).state == FAILED
    assert plenty.run("late", python(""), least=600).state == NOT_BEGUN


def test_a_command_is_asked_to_end_when_the_minutes_are_over(tmp_path):
    """By SIGTERM, on which a run ends as by Ctrl-C; one that does not care is killed."""
    file = tmp_path / "asked"
    polite = (
        f"import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (open({str(file)!r}, 'w'), sys.exit(0)))"
    )
    assert Budget(0.05).run("run", python(f"{polite}; time.sleep(60)")).state == CUT
    assert file.exists()


def test_a_command_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(budget, "GRACE", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    found = Budget(0.05).run("run", python(deaf))
    assert found.state == CUT
    assert found.seconds < 30


def test_what_a_command_has_started_ends_with_it(tmp_path):
    """pytest, for one, ends at once by SIGTERM, and leaves its child processes behind."""
    file = tmp_path / "number"
    left = "import subprocess, time; child = subprocess.Popen(['sleep', '60']);"
    left += f" open({str(file)!r}, 'w').write(str(child.pid)); time.sleep(60)"
    assert Budget(0.05).run("run", python(left)).state == CUT
    stat, until = Path(f"/proc/{file.read_text()}/stat"), time.monotonic() + 30
    while alive(stat) and time.monotonic() < until:  # a killed process may have to wait for a core before it ends
        time.sleep(0.05)
    assert not alive(stat)


def alive(stat: Path) -> bool:
    """Whether the process with this file in /proc still runs; what nobody has waited for yet does not."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# Parts ----------------------------------------------------------------------------------------------------------------


def test_the_check_begins_with_the_tests_on_a_gpu_only(tmp_path):
    there, here = (check.commands(device, False, tmp_path) for device in ("cuda", "cpu"))
    assert "gpu" in there[0][1]
    assert {"test_gpu.py", "test_gpu_training.py", "test_subspace.py"} <= {Path(word).name for word in there[0][1]}
    assert [name for name, _ in there[1:]] == [name for name, _ in here]


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 1), 1)])
def test_the_check_fails_if_a_part_does_and_tells_all_of_them(codes, expected, tmp_path, monkeypatch, capsys):
    parts = [(f"part {code}", python(f"raise SystemExit({code})")) for code in codes]
    monkeypatch.setattr(check, "commands", lambda *_: parts)
    assert check.main(["--device", "cpu", "--out", str(tmp_path)]) == expected
    assert (tmp_path / "check.md").read_text().count("part") == 2


def test_the_check_fails_if_its_minutes_end_before_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "commands", lambda *_: [("part", python(""))])
    assert check.main(["--minutes", "0", "--out", str(tmp_path)]) == 1
    assert "not begun" in (tmp_path / "check.md").read_text()


@pytest.mark.slow
def test_the_most_telling_runs_come_first_and_all_compose():
    planned = papers.cells("full", 2)
    assert planned[0] == ("experiment=stsa_scratch_cifar100", "profile=full", "beta=0.5", "seed=0")
    assert "protip_tip_0_95" in planned[1][2]
    assert len(set(planned)) == len(planned) == 2 * 9
    assert {own for cell in planned[9:] for own in cell if own.startswith("seed=")} == {"seed=1"}
    for cell in planned[:9]:
        settings = load_settings(composed([*cell, "out=x"]))
        assert settings.data.name == "cifar100"


def test_papers_stop_with_the_minutes_and_go_on(tmp_path, monkeypatch):
    """The first run is cut and not told as a failure; the next time it is done, and the rest."""
    marks = tmp_path / "marks"

    def command_of(cell, *_):
        first = f"import pathlib, time; mark = pathlib.Path({str(marks)!r}); was = mark.exists(); mark.touch()"
        return python(f"{first}; time.sleep(0 if was else 60)")

    monkeypatch.setattr(papers, "command_of", command_of)
    monkeypatch.setattr(papers, "LEAST", 0.0)
    monkeypatch.setattr(papers, "TABLES", [])
    options = ["--quick", "--device", "cpu", "--most", "2", "--out", str(tmp_path)]
    assert papers.main([*options, "--minutes", "0.05"]) == 0
    assert (tmp_path / "papers.md").read_text().startswith("0 of 2 runs")
    assert papers.main([*options, "--minutes", "2"]) == 0
    assert (tmp_path / "papers.md").read_text().startswith("2 of 2 runs")


def test_a_run_that_fails_is_told_and_the_others_are_done(tmp_path, monkeypatch):
    codes = iter([1, 0])
    monkeypatch.setattr(papers, "command_of", lambda *_: python(f"raise SystemExit({next(codes)})"))
    monkeypatch.setattr(papers, "TABLES", [])
    assert papers.main(["--quick", "--device", "cpu", "--most", "2", "--out", str(tmp_path)]) == 1
    assert (tmp_path / "papers.md").read_text().startswith("1 of 2 runs")


@pytest.mark.slow
def test_papers_in_miniature_stand_beside_the_printed_numbers(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "papers", "--quick", "--device", "cpu", "--most", "1"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 runs are complete" in done.stdout
    assert "3 with runs of ours" in done.stdout


def test_another_word_is_told(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu", "chekc"])
    assert which() == 2
    assert "try check or papers" in capsys.readouterr().err


def test_kernels_are_counted_once():
    """Kineto tells a kernel's time at the kernel, and again at the operation that started it."""
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    told = [
        ("aten::mm", cpu, 5e6, False),
        ("gemm", cuda, 5e6, False),
        ("Memcpy HtoD (Pageable -> Device)", cuda, 1e6, False),
        ("a range", cuda, 6e6, True),
    ]
    events = [
        SimpleNamespace(key=key, device_type=kind, self_device_time_total=time, is_user_annotation=range_)
        for key, kind, time, range_ in told
    ]
    assert training_throughput.kernel_seconds(events) == 5


# What is carried ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A folder with a file of 250 bytes, one of none, and one in a folder of 90."""
    made = tmp_path / "data"
    (made / "inner").mkdir(parents=True)
    (made / "a").write_bytes(bytes(range(250)))
    (made / "empty").touch()
    (made / "inner" / "b").write_bytes(bytes(90))
    return made


def test_parts_are_small_and_put_together_again(folder, tmp_path, capsys):
    parts = carry.pack([folder], tmp_path / "parts", 100)
    assert len(parts) == 4
    for part in parts:
        pieces = [file for file in part.iterdir() if file.name != carry.MANIFEST]
        assert sum(file.stat().st_size for file in pieces) <= 100
    there = tmp_path / "there"
    for part in reversed(parts[1:]):
        code = carry.main(["unpack", str(part), "--to", str(there)])
        assert code == 3
    assert "data/a" in capsys.readouterr().out
    assert carry.main(["unpack", str(parts[0]), "--to", str(there)]) == 0
    for name in ("a", "empty", "inner/b"):
        assert (there / "data" / name).read_bytes() == (folder / name).read_bytes()
    # Once more: a call that broke off is made again.
    assert carry.main(["unpack", str(parts[1]), "--to", str(there)]) == 0
    assert not list((there / carry.PIECES).iterdir())


def test_a_damaged_piece_is_told(folder, tmp_path, capsys):
    part = carry.pack([folder], tmp_path / "parts", 1000)[0]
    (part / "0").write_bytes(bytes(250))
    assert carry.main(["unpack", str(part), "--to", str(tmp_path / "there")]) == 2
    assert "data/a is damaged" in capsys.readouterr().err
    assert not (tmp_path / "there" / "data" / "a").exists()


def test_wrong_input_is_told(folder, tmp_path, capsys):
    assert carry.main(["pack", str(tmp_path / "absent"), "--to", str(tmp_path / "parts")]) == 2
    assert carry.main(["pack", str(folder), "--to", str(folder)]) == 2
    assert "is no folder" in (told := capsys.readouterr().err)
    assert "is not empty" in told


def test_carrying_needs_only_pythons_own_library(tmp_path, folder):
    """It runs there before anything else is installed; -S leaves out what is installed here."""
    code = [sys.executable, "-I", "-S", carry.__file__, "pack", str(folder), "--to", str(tmp_path / "parts")]
    subprocess.run(code, check=True)
    assert json.loads((tmp_path / "parts" / "part-0" / carry.MANIFEST).read_text())[0]["path"] == "data/a"
