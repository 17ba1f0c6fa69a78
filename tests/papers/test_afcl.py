"""afcl.csv against a second reading of AFCL's text, whose copy has lost every cell that was a formula."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from fcl_bench.papers.matching import LOST_METHOD, left_to_us, words_without_key
from tests.conftest import shared
from tests.papers.reading import Cells, as_typed, compose_all, printed_by
from tests.papers.settings import overrides

DATA = {"CIFAR-100": "cifar100", "Tiny-ImageNet": "tiny_imagenet", "ImageNet-R": "imagenet_r"}
#: As printed -> our name.
OURS = {
    **{"AFCL": "afcl", "Finetune": "finetune", "FedLwF": "fedlwf", "TARGET": "target"},
    **{"FedEwc": "fedewc", "FedIcaRL": "fedicarl", "FedCBC": "fedcbc"},
}
#: Characteristic -> the first task that it is defined for (Eq. 52 takes the tasks before, Eq. 53 the task itself).
FIRST = {"Stability": 2, "Plasticity": 1}
#: Rows of Table F.4 with a number less than there are methods.
SHORT = {
    "Stability": {"CIFAR-100": [2, 4], "Tiny-ImageNet": [2, 3], "ImageNet-R": [2, 3, 4]},
    "Plasticity": {"CIFAR-100": [1, 2, 4], "Tiny-ImageNet": [1, 2], "ImageNet-R": [1, 2, 3]},
}


@pytest.fixture(scope="module")
def text() -> str:
    return shared("papers/afcl.txt").read_text()


@pytest.fixture(scope="module")
def frame():
    return printed_by("afcl")


def block(text: str, header: str) -> list[str]:
    """The lines below the one that starts with `header` for as long as they end in a number or name a data set."""
    lines = text.splitlines()
    (start,) = [n for n, line in enumerate(lines) if line.startswith(header)]
    found = []
    for line in lines[start + 1 :]:
        if not re.search(rf"(\d\.\d\d|{'|'.join(DATA)})$", line):
            return found
        found.append(line)
    raise AssertionError(f"{header} runs to the end of the text")


def by_data_set(lines: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """(characteristic, data set, numbers) of each line with numbers; both names stand once, before their first line."""
    characteristic = dataset = ""
    for line in lines:
        match = re.fullmatch(rf"({'|'.join(FIRST)})?({'|'.join(DATA)})?((?: ?\d+\.\d\d)*)", line)
        assert match, line
        characteristic, dataset = match[1] or characteristic, match[2] or dataset
        if match[3]:
            yield characteristic, dataset, match[3].split()


def accuracy(text: str) -> Cells:
    found: Cells = {}
    for _, dataset, numbers in by_data_set(block(text, "Dataset Task Setting")):
        (number,) = numbers
        before = sum(column.startswith(dataset) for _, column in found)
        found["AFCL", f"{dataset} / setting {before + 1} of 4"] = number
    return found


def characteristics(text: str) -> Cells:
    header = "characteristic Dataset Task "
    (methods,) = [line.removeprefix(header).split() for line in text.splitlines() if line.startswith(header)]
    assert len(methods) == 8
    found: Cells = {}
    task: dict[tuple[str, str], int] = {}
    for characteristic, dataset, numbers in by_data_set(block(text, header)):
        t = task[characteristic, dataset] = task.get((characteristic, dataset), FIRST[characteristic] - 1) + 1
        short = len(numbers) == 7
        assert short == (t in SHORT[characteristic][dataset]), (characteristic, dataset, t)
        rows = [f"number {n} of 7" for n in range(1, 8)] if short else methods
        for row, number in zip(rows, numbers, strict=True):
            found[row, f"{characteristic} / {dataset} / task {t}"] = number
    assert task == {(characteristic, dataset): 10 for characteristic in FIRST for dataset in DATA}
    return found


def test_every_accuracy_is_there_as_printed_and_nothing_else(frame, text):
    assert as_typed(frame, "Table 4.2") == accuracy(text)


def test_every_stability_and_plasticity_is_there_as_printed_and_nothing_else(frame, text):
    assert as_typed(frame, "Table F.4") == characteristics(text)


def test_as_many_numbers_as_in_the_text(frame, text):
    counts = [
        sum(len(re.findall(r"\d+\.\d\d", line)) for line in block(text, header))
        for header in ("Dataset Task Setting", "characteristic ")
    ]
    assert counts == [(frame["table"] == name).sum() for name in ("Table 4.2", "Table F.4")]
    assert sum(counts) == len(frame) == 12 + 57 * 8 - 15


def test_what_the_copy_has_lost_is_still_lost(text):
    """If a better copy brings it, this fails and it can be typed in: the baselines' accuracies, the sensitivity."""
    assert all(len(numbers) == 1 for _, _, numbers in by_data_set(block(text, "Dataset Task Setting")))
    lines = text.splitlines()
    sensitivity = lines.index("1.0!")
    assert lines[sensitivity + 2 : sensitivity + 6] == ["Dataset", *DATA]
    for lost in (
        "partition the entire dataset into or tasks",
        "For CIFAR-100 and Tiny-ImageNet, we set . ",
        "parameters set as and .",
        "among clients using the Dirichlet distribution",
    ):
        assert lost in text


def test_a_number_without_its_column_has_no_method_and_matches_no_run(frame):
    for row in frame.itertuples():
        assert row.row.startswith("number") == (LOST_METHOD in words_without_key(row.setting))
        assert row.method == OURS.get(row.row, "")


def test_what_a_baselines_rows_leave_open_is_ours(frame):
    for row in frame[frame["row"].isin(set(OURS) - {"AFCL"})].itertuples():
        [said] = left_to_us(row.setting)
        unknown = "rates and memory" if row.method == "fedicarl" else "rates"
        assert said == f"clients and beta lost, {unknown} unknown"
        assert (row.clients, row.beta) == ("", "")


def test_the_numbers_after_the_last_task_are_the_ones_that_a_run_has(frame):
    """Stability and plasticity after an earlier task are other quantities than the record's: words in quotes say so."""
    table = frame[frame["table"] == "Table F.4"]
    for row in table.itertuples():
        characteristic, dataset, task = row.column.split(" / ")
        assert (row.metric, row.data, row.tasks) == (characteristic.lower(), DATA[dataset], "10")
        assert ('"after ' + task + ' of 10"' in row.setting) == (task != "task 10")
    assert (table.loc[table["column"].str.endswith("task 10"), "row"].value_counts() == 6).all()


def test_accuracies_say_their_data_set_and_no_setting_that_is_lost(frame):
    table = frame[frame["table"] == "Table 4.2"]
    assert (table["data"] == table["column"].str.split(" / ").str[0].map(DATA)).all()
    assert (table["metric"] == "A_T_tasks").all()
    assert (table[["tasks", "clients", "beta"]] == "").all(axis=None)


def test_the_settings_are_those_of_the_text(frame, text):
    assert "well-established Si-Blurry setting" in text
    assert "has an equal number of samples and follows the Dirichlet distribution" in text
    assert "we adopt ResNet-18 [58] as the unified backbone" in text
    rounds, epochs = {}, {}
    rounds["FedMGP"], epochs["FedMGP"] = re.search(
        r"for FedMGP, each task involves (\d+) communication rounds, and clients perform (\d+) local epochs", text
    ).groups()
    epochs["FedCBC"], rounds["FedCBC"] = re.search(
        r"FedCBC conducts (\d+) local epochs on each client with (\d+) communication rounds", text
    ).groups()
    others = re.search(r"each task involves (\d+) communication rounds, and clients perform (\d+) local epochs", text)
    others = re.search(r"For all other baseline methods, " + others.re.pattern, text).groups()
    for row in frame.itertuples():
        keys = overrides(row.setting)
        assert (keys["split"], keys["partition"]) == ("si_blurry", "dirichlet_equal_sizes")
        assert row.backbone == "resnet18_afl"
        known = row.row != "AFCL" and not row.row.startswith("number")
        training = (rounds.get(row.row, others[0]), epochs.get(row.row, others[1])) if known else (None, None)
        assert (keys.get("method.training.rounds"), keys.get("method.training.epochs")) == training


def test_a_command_line_takes_every_setting(frame):
    assert compose_all(frame) >= 5 * 3
