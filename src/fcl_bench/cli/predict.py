"""`fcl-bench predict RUN [DATA]`: a table of the classes that a run's model predicts for samples."""

from __future__ import annotations

import csv
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np

from fcl_bench.cli.command import DONE, Parser
from fcl_bench.errors import UserError
from fcl_bench.files import csv_cell, replacing, special, user_path

if TYPE_CHECKING:
    from fcl_bench.execution.predicting import Model

#: Names under which an .npz file may hold samples and their labels; the first name that exists is used.
_INPUT_NAMES, _LABEL_NAMES = ("x_test", "x", "images", "features"), ("y_test", "y", "labels")


class _Samples(NamedTuple):
    """The samples to predict, the name of each, and their classes and tasks where these are known.

    A class is a text, or a number as the run's data set has it.
    """

    inputs: Any
    names: list[str]
    classes: Sequence[str | int] | None = None
    tasks: np.ndarray | None = None


def work(arguments: list[str]) -> int:
    """Write the table. Raises a `UserError` if the run, the data or a file does not exist."""
    options = parsed(arguments)
    # Libraries are imported only now, so that errors about wrong options are quick.
    from fcl_bench.execution.predicting import Model

    path, folder = _model(options.run, options.out)
    model = Model(path, options.device)
    samples = _samples(options.data, options.keys, model, folder)
    labels, scores = model.answers(samples.inputs, samples.tasks)
    name_of = dict(zip(model.labels.tolist(), model.class_names.tolist(), strict=True))
    given = [name_of[label] for label in labels.tolist()]
    rows = zip(samples.names, given, (f"{score:.6g}" for score in scores.tolist()), strict=True)
    truth = [own if isinstance(own, str) else name_of.get(own, str(own)) for own in samples.classes or ()]
    with _written(options.to) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["sample", "class", "score", *(["label"] if truth else [])])
        for number, row in enumerate(rows):
            writer.writerow([*map(csv_cell, row), *map(csv_cell, truth[number : number + 1])])
    if truth:
        right = sum(answer == own for answer, own in zip(given, truth, strict=True))
        line = f"accuracy: {100 * right / len(truth):.2f} % ({right:,} of {len(truth):,})"
        # It goes to stderr if the table goes to stdout.
        print(line, file=sys.stdout if options.to else sys.stderr)
    if options.to:
        print(f"written: {options.to}")
    return DONE


def parsed(arguments: list[str]) -> Any:
    """Parse the options and arguments after `fcl-bench predict`."""
    what = "Predict samples with the model of a complete run: one line per sample with its class and the score."
    parser = Parser(prog="fcl-bench predict", description=what)
    parser.add_argument("run", metavar="RUN", help="folder or id of a run, or its model.safetensors")
    data = (
        "an .npz file (x_test or images or features; y_test or labels if known), an .npy file, an image, a folder of "
        "images or with a folder per class, or data=NAME for the test samples of a data set, with its keys as a run "
        "takes them (data.path=FOLDER); default: the run's own"
    )
    parser.add_argument("data", metavar="DATA", nargs="?", help=data)
    parser.add_argument("--to", metavar="FILE", help="write the table there (default: to the terminal)")
    where = "where runs are looked for by id (outputs); out=FOLDER is the same"
    parser.add_argument("--out", default="outputs", metavar="FOLDER", help=where)
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:N (auto); or device=NAME"
    )
    # All these are keys of a run, and a user types them as for a run, wherever they stand.
    keys = [typed for typed in arguments if re.match(r"data\.[\w.]+=", typed)]
    others = [typed for typed in arguments if typed not in keys]
    as_options = [f"--{typed}" if typed.startswith(("out=", "device=")) else typed for typed in others]
    options = parser.parse_intermixed_args(as_options)
    options.keys = keys
    return options


def _model(given: str, out: str) -> tuple[Path, Path | None]:
    """The model's file and the run's folder; the folder is None for a model outside of a run."""
    from fcl_bench.execution.folder import RunFolder, run_folder

    path = user_path("RUN", given)
    if path.suffix == ".safetensors" and path.is_file() and not (path.parent / "run.json").exists():
        return path, None
    folder = run_folder(given, out)
    RunFolder(folder).verified(["model.safetensors"])
    return folder / "model.safetensors", folder


def _samples(data: str | None, keys: list[str], model: Model, folder: Path | None) -> _Samples:
    if data is not None and data.startswith("data="):
        return _data_set(data, keys, model)
    if keys:
        raise UserError(f"{keys[0]} needs a data set beside it", f"data=NAME, such as data=imagefolder {keys[0]}")
    if data is None:
        return _own(folder)
    path = user_path("DATA", data)
    if path.is_dir():
        return _folder(path, model)
    if not path.is_file():
        raise UserError(f"{data} is no file and no folder", "an .npz file, images, or data=NAME such as data=digits")
    return _array(path) if path.suffix in (".npz", ".npy") else _Samples([path], [path.name])


def _own(folder: Path | None) -> _Samples:
    from fcl_bench.execution.folder import RunFolder
    from fcl_bench.execution.predicting import tested_samples

    if folder is None:
        raise UserError("a model that is in no run's folder has no test samples", "DATA, such as data=digits")
    run = RunFolder(folder)
    record = run.verified(["config.yaml", "partition.npz"])
    inputs, labels, tasks, indices = tested_samples(folder, record, run.config())
    return _Samples(inputs, [str(index) for index in indices.tolist()], labels.tolist(), tasks)


def _data_set(data: str, keys: list[str], model: Model) -> _Samples:
    """The test samples of a data set. Its names say which classes are the model's; it may number them otherwise."""
    from fcl_bench.cli.overrides import composed_as_typed, ordered
    from fcl_bench.config import load_settings

    dataset = load_settings(composed_as_typed(ordered([data, *keys]))).data.load()
    test, named = dataset.test, dataset.class_names and model.about["class_names"]
    classes = [dataset.class_names[label] for label in test.labels.tolist()] if named else test.labels.tolist()
    return _Samples(test.inputs, [str(index) for index in range(len(test))], classes)


def _folder(path: Path, model: Model) -> _Samples:
    """Read images at any depth, with their labels if they are in one folder per class that the model knows by name."""
    from fcl_bench.data.images.stored import IMAGE_SUFFIXES

    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
    if not files:
        raise UserError(f"{path} holds no images", f"files ending in {', '.join(sorted(IMAGE_SUFFIXES))}")
    classes = [file.relative_to(path).parts[0] for file in files]
    known = set(classes) <= set(model.class_names.tolist())
    return _Samples(files, [file.relative_to(path).as_posix() for file in files], classes if known else None)


def _array(path: Path) -> _Samples:
    try:
        loaded = np.load(path, allow_pickle=False)
        arrays = {"x": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except Exception as error:  # NumPy, zipfile and zlib raise many kinds on foreign bytes
        raise UserError(
            f"{path} is not a readable .npz or .npy file", f"an array {' or '.join(_INPUT_NAMES)}"
        ) from error
    samples, labels = (
        next((arrays[name] for name in names if name in arrays), None) for names in (_INPUT_NAMES, _LABEL_NAMES)
    )
    if samples is None:
        raise UserError(f"{path} holds {', '.join(arrays) or 'nothing'}", f"an array {' or '.join(_INPUT_NAMES)}")
    if labels is not None and labels.shape != (len(samples),):
        raise UserError(f"{path} has labels of the shape {labels.shape} for {len(samples)} samples", "one per sample")
    return _Samples(
        samples, [str(number) for number in range(len(samples))], None if labels is None else labels.tolist()
    )


@contextmanager
def _written(to: str | None) -> Iterator[TextIO]:
    """Open the output for the table: a file, written whole or not at all, or the terminal."""
    if to is None:
        yield sys.stdout
        return
    path = user_path("--to", to)
    if found := special(path):
        raise UserError(f"--to {to} is {found}", "a file, or no --to for the terminal")
    # A link stays, and the file that it leads to is written.
    path = Path(os.path.realpath(path))
    try:
        with replacing(path) as temporary, temporary.open("w", newline="") as file:
            yield file
    except OSError as error:
        raise UserError(f"--to {to} cannot be written: {error.strerror or error}", "another file") from error
