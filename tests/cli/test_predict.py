"""`fcl-bench predict`: what may be asked about, what is written, and what is refused."""

from __future__ import annotations

import csv
import io
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from fcl_bench.execution.predicting import Model
from tests.conftest import write_features
from tests.small_runs import run_in, settings_for

SMALL = ("method=stsa", "method.M=64", "tasks=2", "clients=2", "device=cpu")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A run on images, its test images and their labels."""
    outcome = run_in(tmp_path_factory.mktemp("digits"), *SMALL)
    test = settings_for(outcome.folder, *SMALL).data.load().test
    return outcome, test.inputs.pixels, test.labels


@pytest.fixture(scope="module")
def featured(tmp_path_factory):
    """A run on ready features, and the file of these."""
    folder = tmp_path_factory.mktemp("featured")
    file = write_features(folder / "features.npz")
    return run_in(folder, *SMALL, "data=features", f"data.path={file}"), file


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize("typed", ["--out={}", "out={}"])
def test_the_runs_own_test_samples_by_default(digits, command, typed):
    outcome, _, labels = digits
    out = outcome.folder.parent.parent
    code, printed, told = command("predict", outcome.record["run_id"], typed.format(out), "device=cpu")
    assert code == 0
    rows = table(printed)
    assert [int(row["label"]) for row in rows] == labels.tolist()
    right = sum(row["class"] == row["label"] for row in rows)
    assert 100 * right / len(rows) == outcome.record["metrics"]["A_T"]
    assert told == f"accuracy: {outcome.record['metrics']['A_T']:.2f} % ({right} of {len(rows)})\n"


def test_every_form_of_the_same_images_has_the_same_answers(digits, command, tmp_path):
    outcome, pixels, labels = digits
    few = pixels[:12]
    expected = [str(label) for label in Model(outcome.folder / "model.safetensors", "cpu").predict(few)]
    np.savez(tmp_path / "images.npz", images=few, labels=labels[:12])
    np.save(tmp_path / "images.npy", few)
    np.savez(tmp_path / "flat.npz", features=few.reshape(12, -1) / np.float32(255))
    for number, image in enumerate(few):
        place = tmp_path / "flat" / f"{number:02}.png"
        by_class = tmp_path / "classes" / str(labels[number]) / f"{number:02}.png"
        for file in (place, by_class):
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
    for data, labelled in (("images.npz", True), ("images.npy", False), ("flat.npz", False), ("flat", False)):
        code, printed, told = command("predict", outcome.folder, tmp_path / data)
        rows = table(printed)
        assert code == 0, told
        assert [row["class"] for row in rows] == expected, data
        assert ("label" in rows[0]) is labelled
        assert ("accuracy" in told) is labelled
    _, printed, _ = command("predict", outcome.folder, tmp_path / "flat" / "03.png")
    assert [row["class"] for row in table(printed)] == expected[3:4]
    _, printed, told = command("predict", outcome.folder, tmp_path / "classes")
    rows = {row["sample"].rpartition("/")[2]: row for row in table(printed)}
    assert [rows[f"{number:02}.png"]["class"] for number in range(12)] == expected
    assert [rows[f"{number:02}.png"]["label"] for number in range(12)] == [str(label) for label in labels[:12]]


def test_a_file_is_written_whole(digits, command, tmp_path):
    outcome, *_ = digits
    code, printed, _ = command("predict", "--to", tmp_path / "made.csv", outcome.folder, "data=digits")
    assert code == 0
    assert printed.endswith(f"written: {tmp_path / 'made.csv'}\n")
    _, shown, _ = command("predict", outcome.folder)
    assert (tmp_path / "made.csv").read_text() == shown


def test_a_model_alone_is_enough(digits, command, tmp_path):
    outcome, *_ = digits
    alone = shutil.copy(outcome.folder / "model.safetensors", tmp_path / "alone.safetensors")
    assert command("predict", alone, "data=digits")[1] == command("predict", outcome.folder)[1]
    code, _, told = command("predict", alone)
    assert (code, "no run's folder has no test samples" in told) == (2, True)


def test_features_and_their_own_labels(featured, command):
    outcome, file = featured
    code, printed, told = command("predict", outcome.folder, file)
    assert code == 0
    assert {row["label"] for row in table(printed)} == {"0", "3", "5", "7", "11", "400"}
    assert f"accuracy: {outcome.record['metrics']['A_T']:.2f} %" in told
    assert command("predict", outcome.folder)[1] == printed  # its own test set


def test_a_data_set_with_its_keys(featured, command):
    outcome, file = featured
    expected = [row["class"] for row in table(command("predict", outcome.folder, file)[1])]
    for typed in (("data=features", f"data.path={file}"), (f"data.path={file}", "data=features")):
        code, printed, told = command("predict", outcome.folder, *typed)
        assert code == 0, told
        assert [row["class"] for row in table(printed)] == expected


@pytest.mark.slow
def test_labels_may_be_names_and_other_data_may_number_them_otherwise(command, tmp_path):
    """Names were compared with numbers, and the numbers of two data sets with each other."""
    file = write_features(tmp_path / "all.npz")
    arrays = dict(np.load(file))
    named = {name: arrays[name].astype(str) for name in ("y_train", "y_test")}
    np.savez(file, **{**arrays, **named})
    outcome = run_in(tmp_path, "method=stsa", "data=features", f"data.path={file}", "tasks=2", "clients=2")
    expected = f"accuracy: {outcome.record['metrics']['A_T']:.2f} %"
    assert expected in command("predict", outcome.folder)[2]
    assert expected in command("predict", outcome.folder, file)[2]
    kept = {side: named[f"y_{side}"] != "0" for side in ("train", "test")}  # another file lacks the first class
    fewer = {f"{kind}_{side}": {**arrays, **named}[f"{kind}_{side}"][kept[side]] for kind in "xy" for side in kept}
    np.savez(tmp_path / "fewer.npz", **fewer)
    code, printed, told = command("predict", outcome.folder, "data=features", f"data.path={tmp_path / 'fewer.npz'}")
    assert code == 0
    assert [row["label"] for row in table(printed)] == fewer["y_test"].tolist()
    right = sum(row["label"] == row["class"] for row in table(printed))
    assert right > 40
    assert f"({right} of 50)" in told


def test_what_cannot_be_asked_is_told_in_a_line(digits, featured, command, tmp_path):
    outcome, pixels, _ = digits
    np.savez(tmp_path / "wide.npz", x=np.zeros((3, 5)))
    np.savez(tmp_path / "hole.npz", x=np.where(np.arange(192).reshape(3, 64) == 70, np.nan, 0.0))
    np.savez(tmp_path / "labels.npz", images=pixels[:3], labels=[1, 2])
    np.savez(tmp_path / "other.npz", z=np.zeros(3))
    np.savez(tmp_path / "images.npz", images=pixels[:3])
    np.savez(tmp_path / "large.npz", images=np.zeros((2, 9, 9), dtype=np.uint8))
    np.savez(tmp_path / "floats.npz", images=pixels[:3] / 255)
    (tmp_path / "bytes.npz").write_bytes(b"nonsense")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "fifo")
    old = tmp_path / "old.safetensors"
    from safetensors.torch import load_file, save_file

    save_file(load_file(outcome.folder / "model.safetensors"), old)
    odd = [tmp_path / f"odd{number}.safetensors" for number in range(3)]
    for file, said in zip(odd, ("{", "[]", "{}"), strict=True):
        save_file({}, file, metadata={"fcl_bench": said})
    ours = outcome.folder
    for typed, words in (
        ((), "the following arguments are required: RUN (fcl-bench predict --help"),
        (("nope",), "no complete run nope in outputs/runs"),
        ((tmp_path / "empty",), "holds no complete run"),
        ((ours, "nope"), "nope is no file and no folder"),
        ((ours, "data=nope"), "data=nope is not known"),
        ((ours, "data=features"), "data=features needs data.path"),
        ((ours, "data=features", "data.pth=x"), "unknown key data.pth (did you mean data.path"),
        ((ours, "data.path=x"), "data.path=x needs a data set beside it (data=NAME, such as "),
        ((ours, "images.npz", "data.path=x"), "data.path=x needs a data set beside it"),
        *(((ours, f"data={odd}"), f"data={odd} is no choice") for odd in ("[1]", "1", "null", "{a:1}")),
        ((ours, f"data={'x' * 300}"), "is not known (choices: "),
        ((ours, tmp_path / "empty"), "holds no images"),
        ((ours, tmp_path / "wide.npz"), "inputs have 5 features (the model's 64)"),
        ((ours, tmp_path / "hole.npz"), "inputs hold NaN or infinity in row 1 (every feature is a finite number)"),
        ((ours, tmp_path / "labels.npz"), "labels of the shape (2,) for 3 samples"),
        ((ours, tmp_path / "other.npz"), "other.npz holds z (an array x_test or"),
        ((ours, tmp_path / "bytes.npz"), "is not a readable .npz or .npy file"),
        ((ours, tmp_path / "large.npz"), "makes 81 features"),
        ((ours, tmp_path / "floats.npz"), "of shape (3, 8, 8) and type float64 are neither images nor features"),
        ((featured[0].folder, tmp_path / "images.npz"), "inputs are images, and the model was made on features"),
        ((old, "data=digits"), "does not say what it is (the model.safetensors of a run"),
        *(((file, "data=digits"), "what it says of itself cannot be read") for file in odd),
        ((tmp_path / "bytes.npz", "data=digits"), "holds no complete run"),
        ((ours, "--to", tmp_path / "empty"), "empty is a folder (a file, or no --to"),
        ((ours, "--to", "."), "--to . is a folder"),
        ((ours, "--to", ""), "--to is a folder"),
        ((ours, "--to", tmp_path / "fifo"), "fifo is a FIFO"),
        ((ours, "--device", "tpu"), "device=tpu"),
    ):
        code, printed, told = command("predict", *typed)
        assert code == 2, typed
        assert words in told, (typed, told)
        assert told.count("\n") == 1
        assert "Traceback" not in told
        assert not printed
    assert (tmp_path / "fifo").is_fifo()


def test_a_link_stays_and_the_file_that_it_leads_to_is_written(featured, command, tmp_path):
    (tmp_path / "link.csv").symlink_to(tmp_path / "made.csv")
    assert command("predict", "--to", tmp_path / "link.csv", featured[0].folder)[0] == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert table((tmp_path / "made.csv").read_text())


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "partition.npz", "model.safetensors"])
def test_a_damaged_run_is_told_and_not_trusted(featured, command, tmp_path, name):
    """A model whose bits had changed predicted all the same; other files ended with a traceback."""
    folder = shutil.copytree(featured[0].folder, tmp_path / "run")
    content = bytearray((folder / name).read_bytes())
    content[-100] ^= 1  # of the model a weight
    (folder / name).write_bytes(content)
    code, printed, told = command("predict", folder)
    assert (code, printed, told.count("\n")) == (2, "", 1)
    assert f"run folder {folder} is damaged: " in told
    assert command("predict", folder, featured[1])[0] == (2 if name in ("run.json", "model.safetensors") else 0)
    (folder / name).unlink()
    assert command("predict", folder)[0] == 2
