"""`make gpu-check`: what has to hold on a GPU, the most important first, within a budget of minutes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.gpu.budget import DONE, Budget, Outcome, table

_BENCHMARKS = Path(__file__).resolve().parents[1]


def commands(device: str, quick: bool, out: Path) -> list[tuple[str, list[str]]]:
    """Name and command of each part.

    Args:
        device: cuda; cpu only rehearses, and leaves out the tests that are skipped there.
        quick: small sizes.
        out: where results go.
    """
    python = sys.executable
    lines = [python, str(_BENCHMARKS / "gpu_lines.py"), "--device", device, "--out", str(out)]
    suite = [python, "-m", "pytest", str(_BENCHMARKS / "suite" / "bench_statistics.py")]
    suite += [str(_BENCHMARKS / "suite" / "bench_methods.py"), "--device", device]
    suite += ["--size", "smoke" if quick else "quick", f"--benchmark-json={out / f'methods-{device}.json'}"]
    choices = [python, str(_BENCHMARKS / "network_choices.py"), "--device", device, "--out", str(out)]
    choices += ["--backbone", "tiny", "--batch", "8", "--batches", "1", "--rounds", "1"] if quick else []
    tests = [python, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
    tests += [str(file) for file in files_of_tests()]
    parts = [
        ("tests that need a GPU", tests),
        ("scores on CPU and GPU, kernels' share, extraction, statistics", lines + ["--quick"] * quick),
        ("closed-form methods", suite),
        ("compiled and autotuned networks beside those as they are", choices),
    ]
    return parts if device.startswith("cuda") else parts[1:]


def files_of_tests() -> list[Path]:
    """Those with tests that need a GPU; others may import what a machine without network lacks."""
    files = sorted((_BENCHMARKS.parent / "tests").rglob("test_*.py"))
    return [file for file in files if "pytest.mark.gpu" in file.read_text()]


def main(typed: list[str] | None = None) -> int:
    """Run the parts; exit code 1 if one failed, or the budget ended before it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu check", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N; cpu to rehearse")
    parser.add_argument("--minutes", type=float, default=25, help="after which it stops (25)")
    parser.add_argument("--quick", action="store_true", help="small sizes: to rehearse")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu/check"))
    options = parser.parse_args(typed)
    options.out.mkdir(parents=True, exist_ok=True)
    budget, outcomes = Budget(options.minutes), list[Outcome]()
    file = options.out / "check.md"
    for name, command in commands(options.device, options.quick, options.out):
        print(f"--- {name} ({budget.left / 60:.1f} minutes left): {' '.join(command)}", flush=True)
        outcomes.append(budget.run(name, command))
        file.write_text(table(outcomes))
    print(f"\n{table(outcomes)}written: {file}")
    return int(any(own.state != DONE for own in outcomes))
