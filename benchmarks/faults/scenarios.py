"""Small commands of every kind that writes something: each takes a tenth of a second in a forked process."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.faults.forks import forked, quiet

FEATURES = ("data=features", "tasks=2", "clients=2", "seed=1")
IMAGES = ("data=imagefolder", "backbone=tiny", "backbone.width=4", "tasks=2", "clients=2", "partition.min_size=0")
ROUNDS = ("training.rounds=2", "training.epochs=1", "training.batch_size=16")


@dataclass(frozen=True)
class Scenario:
    """A command.

    Attributes:
        name: of the scenario.
        overrides: of fcl-bench; `data.path`, `out` and `cache.dir` come to them.
        kind: "run"; "sweep", whose overrides Hydra composes in each process, since that is a part of it; "tables", of
            runs that are there; "preview".
        below: only points below this folder are tried, since the others are another scenario's.
        share: of the cases, in percent, by what they take.
    """

    name: str
    overrides: tuple[str, ...]
    kind: str = "run"
    below: str = ""
    share: int = 20


SCENARIOS = [
    Scenario("closed form", (*FEATURES, "method=stsa", "method.M=16")),
    Scenario(
        "rounds",
        (
            *(*FEATURES, "method=fedavg", "method.trains=features", "checkpoint_rounds=1", "evaluate_rounds=1"),
            *(f"method.{key}" for key in ROUNDS),
        ),
    ),
    Scenario("extraction", (*IMAGES, "method=fedran", "method.M=16", "method.rank=4")),
    Scenario(
        "adaptation",
        (*IMAGES, "method=fedncm", "adapt=fedavg", "checkpoint_rounds=1", *(f"adapt.{key}" for key in ROUNDS)),
    ),
    Scenario(
        "network", (*IMAGES, "method=fedprotip", "checkpoint_rounds=1", *(f"method.{key}" for key in ROUNDS)), share=5
    ),
    Scenario("preview", (*FEATURES, "preview=true"), kind="preview", share=5),
    Scenario("tables", (*FEATURES, "method=stsa", "method.M=16"), kind="tables", share=5),
    Scenario("sweep", (*FEATURES, "method=afl", "seed=1,2"), kind="sweep", below="/out/sweeps", share=5),
]


class Stage:
    """The scenarios' inputs, and how each is carried out.

    Args:
        folder: for the inputs and the undisturbed results.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.inputs = folder / "inputs"
        self.inputs.mkdir(exist_ok=True)
        write_features(self.inputs / "features.npz")
        write_images(self.inputs / "images")
        _without_pictures()
        self._configs: dict[str, object] = {}

    def overrides(self, scenario: Scenario, out: Path) -> list[str]:
        """All overrides of the command line."""
        path = self._path(scenario, self.inputs)
        return [*scenario.overrides, f"data.path={path}", f"out={out}/out", f"cache.dir={out}/cache"]

    def undisturbed(self, scenario: Scenario) -> Path:
        """The folder in which the command was carried out once; the first call does so."""
        folder = self.folder / "undisturbed" / scenario.name.replace(" ", "-")
        if not folder.exists():
            self.prepare(scenario, folder)
            with quiet():  # in this very process, so that its children find everything imported
                code = self.work(scenario, folder)()
            if code != 0:
                told = forked(self.work(scenario, folder)).last()
                raise RuntimeError(f"{scenario.name} does not work even undisturbed: {told}")
        return folder

    def prepare(self, scenario: Scenario, out: Path) -> None:
        """What must be there before the command: the runs, for tables."""
        out.mkdir(parents=True)
        if scenario.kind != "tables":
            return
        kept = self.folder / "runs for tables"
        if not kept.exists():
            run = Scenario("run for tables", scenario.overrides)
            with quiet():
                code = self.work(run, kept)()
            assert code == 0
        shutil.copytree(kept, out, dirs_exist_ok=True)

    @staticmethod
    def _path(scenario: Scenario, inputs: Path) -> Path:
        return inputs / ("images" if "data=imagefolder" in scenario.overrides else "features.npz")

    def work(self, scenario: Scenario, out: Path, inputs: Path | None = None) -> Callable[[], int]:
        """The command in `out`, to be called in the process that is to carry it out.

        Args:
            inputs: where the data are; None: those of the stage.
        """
        if scenario.kind == "tables":
            return lambda: _tables(out)
        if scenario.kind == "sweep":
            return lambda: _typed(["-m", *self.overrides(scenario, out)])
        from fcl_bench.composition import composed

        if scenario.name not in self._configs:
            # Composing takes most of so short a run's time, and writes nothing.
            self._configs[scenario.name] = composed(self.overrides(scenario, Path("/nowhere")))
        return lambda: _run(self._configs[scenario.name], out, self._path(scenario, inputs or self.inputs))


def _run(composed: object, out: Path, path: Path) -> int:
    from omegaconf import OmegaConf

    from fcl_bench.cli.app import carry_out
    from fcl_bench.cli.command import run_command

    config = composed.copy()  # type: ignore[attr-defined]
    for key, value in (("out", f"{out}/out"), ("data.path", str(path))):
        OmegaConf.update(config, key, value)
    OmegaConf.update(config, "cache.dir", f"{out}/cache")
    return run_command("fcl-bench", lambda: carry_out(config, []).code)


def _typed(arguments: list[str]) -> int:
    from fcl_bench.cli.app import main

    sys.argv = ["fcl-bench", *arguments]
    return main()


def _tables(out: Path) -> int:
    from fcl_bench.cli.tables import main

    sys.argv = ["fcl-tables", "--out", f"{out}/out", "--metrics", "A_T"]
    return main()


def _without_pictures() -> None:
    """Write pictures without drawing them: drawing takes most of a short run's time, and touches no file."""
    import fcl_bench.environment
    import fcl_bench.execution.preview
    import fcl_bench.execution.run
    import fcl_bench.results.figures.canvas
    from fcl_bench.backbones import extract

    class Drawn:
        def savefig(self, path: Path, **_: object) -> None:
            Path(path).write_bytes(b"picture" * 3000)

    fcl_bench.execution.run.drawn = lambda *_: {"accuracy.png": b"picture" * 3000}
    fcl_bench.results.figures.canvas.drawn = lambda *_: b"picture"
    fcl_bench.execution.preview.preview_figure = lambda *_: Drawn()  # type: ignore[assignment,return-value]
    # A process of git's, and every batch a chunk on disk.
    fcl_bench.environment.git_commit = lambda: None
    extract.SECONDS_PER_CHUNK = 0.0


def write_features(path: Path, samples: int = 60, **changes: np.ndarray) -> Path:
    """A feature file of 6 separable classes and 12 features; `changes` replace its arrays."""
    rng = np.random.default_rng(0)
    centres = 3 * rng.standard_normal((6, 12))
    arrays: dict[str, np.ndarray] = {}
    for side, count in (("train", samples), ("test", samples // 2)):
        labels = np.arange(count) % 6
        arrays[f"x_{side}"] = (centres[labels] + rng.standard_normal((count, 12))).astype(np.float32)
        arrays[f"y_{side}"] = labels
    np.savez(path, **{**arrays, **changes})  # type: ignore[arg-type]
    return path


def write_images(folder: Path, classes: int = 4, train: int = 6, test: int = 2) -> Path:
    """Separable classes of 8 x 8 pixels."""
    rng = np.random.default_rng(0)
    for label in range(classes):
        centre = rng.integers(40, 216, (8, 8, 3))
        for side, count in (("train", train), ("test", test)):
            (folder / side / f"class{label}").mkdir(parents=True)
            for number in range(count):
                pixels = (centre + rng.integers(-40, 41, centre.shape)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / side / f"class{label}" / f"{number}.png")
    return folder


def fresh(folder: Path) -> Path:
    """`folder`, empty or not there."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def scratch_root() -> str | None:
    """The root for temporary files: in memory if the system has such a place, since no power is cut here."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
