"""stsa.csv against a second reading of STSA's text: its tables are tab-separated lines there."""

from __future__ import annotations

import re
from itertools import groupby

import pytest

from fcl_bench.papers.matching import left_to_us
from tests.conftest import shared
from tests.papers.reading import printed_by
from tests.papers.settings import overrides

#: Heading of a column in the text -> as our files have it.
HEADINGS = {"A_{\\text{avg}}": "A_avg", "A_T": "A_T", "F_T": "F_T"}
METRICS = {"A_avg": "A_avg_tasks", "A_T": "A_T_tasks", "F_T": "forgetting"}
DATA = {"CIFAR100": "cifar100", "Tiny-ImageNet": "tiny_imagenet", "ImageNet-R": "imagenet_r"}

Cells = dict[tuple[str, str, str], str]


@pytest.fixture(scope="module")
def text() -> str:
    return shared("papers/stsa.txt").read_text()


@pytest.fixture(scope="module")
def everything():
    return printed_by("stsa")


@pytest.fixture(scope="module")
def frame(everything):
    """What a run can be put beside: all but Table 6, an attack."""
    return everything[everything["table"] != "Table 6"]


@pytest.fixture(scope="module")
def cells(text) -> Cells:
    """Every cell of Tables 1 to 6 that is no dash: (table, row, column) -> its text."""
    found: Cells = {}
    for table, rows in grids(text).items():
        read = READERS.get(table, one_heading)
        found |= {(table, row, column): cell for row, column, cell in read(rows) if cell != "-"}
    return found


def grids(text: str) -> dict[str, list[list[str]]]:
    """Table's name -> its tab-separated lines; its caption stands above it (Tables 1, 2, 6) or below it."""
    lines = [line for line in text.splitlines() if line.strip()]
    found: dict[str, list[list[str]]] = {}
    for tabbed, block in groupby(range(len(lines)), key=lambda n: "\t" in lines[n]):
        if tabbed:
            numbers = list(block)
            beside = [re.match(r"Table (\d)\. ", lines[n]) for n in (numbers[0] - 1, numbers[-1] + 1)]
            name = f"Table {(beside[0] or beside[1])[1]}"
            assert name not in found
            found[name] = [[plain(cell) for cell in lines[n].split("\t")] for n in numbers]
    assert sorted(found) == [f"Table {n}" for n in range(1, 7)]
    return found


def plain(cell: str) -> str:
    """Without emphasis, arrows, citation, "(Ours)" and the dollars of formulas."""
    cell = re.sub(r"</?u>|\*\*|\(?\\(up|down)arrow\)?|\(Ours\)|\([^()]*,? \d{4}\)|\$", "", cell).strip()
    return HEADINGS.get(cell, cell.replace("\\beta", "β"))


def two_headings(rows):
    """Betas over metrics; the data set stands once, at its first method."""
    betas, metrics, dataset = rows[0][2:], rows[1][2:], ""
    filled = [betas[n - n % 3] for n in range(len(metrics))]
    for first, name, *values in rows[2:]:
        dataset = first or dataset
        for beta, metric, value in zip(filled, metrics, values, strict=True):
            yield name, f"{dataset} / {beta} / {metric}", value


def one_heading(rows):
    """Metrics; the group stands once, at its first method."""
    metrics, group = rows[0][2:], ""
    for first, name, *values in rows[1:]:
        group = first or group
        for metric, value in zip(metrics, values, strict=True):
            yield name, f"{group} / {metric}", value


def costs(rows):
    """Two costs; the group has a line of its own, with M and K_D at its end."""
    headings, group = rows[0][1:], ""
    for name, *values in rows[1:]:
        if not any(values):
            group = name.split(", M =")[0]
            continue
        for heading, value in zip(headings, values, strict=True):
            yield name, f"{group} / {heading}", value


def similarities(rows):
    """Three measures below one heading."""
    measures = rows[1][1:]
    for name, *values in rows[2:]:
        for measure, value in zip(measures, values, strict=True):
            yield name, measure, value


READERS = {"Table 1": two_headings, "Table 2": two_headings, "Table 5": costs, "Table 6": similarities}


def test_every_cell_is_there_as_printed_and_nothing_else(everything, cells):
    rows = list(everything.itertuples())
    ours = {(row.table, row.row, row.column): row.value for row in rows if row.table != "Table 5"}
    ours |= {(row.table, row.row, row.column): f"{row.value} {row.unit}" for row in rows if row.table == "Table 5"}
    assert len(ours) == len(everything)
    assert ours == cells


def test_the_counts_of_the_tables(cells):
    """The second reading has lost no line either: methods x betas x metrics, Joint with A_T alone."""
    counts = [sum(table == f"Table {n}" for table, _, _ in cells) for n in range(1, 7)]
    assert counts == [2 * (6 * 9 + 3), 2 * (6 * 9 + 3), 8 * 3, 6 * 3, 6 * 2, 5 * 3]


def test_metric_data_and_beta_say_what_the_headings_say(frame, text):
    assert "The dataset is CIFAR100 ($\\beta = 0.5$)." in text
    for row in frame.itertuples():
        last = row.column.split(" / ")[-1]
        assert row.metric == METRICS.get(last, row.metric)
        assert row.unit == "%" or last in ("Communication Overhead", "Wallclock Time")
        if row.table in ("Table 1", "Table 2"):
            dataset, beta, _ = row.column.split(" / ")
            assert (row.data, f"β = {row.beta}") == (DATA[dataset], beta)
        else:
            assert (row.data, row.beta) == ("cifar100", "0.5" if row.table == "Table 3" else "")


def test_the_method_is_the_rows(frame):
    names = {"Joint (Upper-bound)": "centralised", "STSA": "stsa", "STSA-E": "stsa_e"}
    names |= {"Fed-EWC": "fedewc", "Fed-LWF": "fedlwf", "MFCL": "mfcl", "LANDER": "lander"}
    names |= {"Fed-DualP": "dualprompt", "Fed-CODAP": "coda_prompt", "Fed-CPrompt": "cprompt"}
    names |= {"PILoRA": "pilora", "PLoRA": "pilora"}
    assert (frame["method"] == frame["row"].str.split("+").str[0].map(names).fillna("")).all()


def test_the_attacks_of_table_6_are_no_method(everything):
    attacks = everything[everything["table"] == "Table 6"]
    assert (attacks["method"] == "").all()
    assert attacks["setting"].str.contains("no such method here: an attack").all()
    assert (attacks["metric"] == attacks["column"] + " of the reconstructed image").all()


def test_classical_baselines_are_as_the_public_code_of_the_benchmark_that_the_text_names(frame, text):
    """It averages uniformly, and the penalty of its Fed-EWC reaches no weight."""
    assert "Following the benchmark in (Zhang et al., 2023; Tran et al., 2024)" in text  # TARGET, LANDER
    for row in frame[frame["row"].isin(["Fed-EWC", "Fed-LWF"])].itertuples():
        keys = overrides(row.setting)
        assert keys["method.training.weighting"] == "uniform"
        assert left_to_us(row.setting) == ["code unknown, as TARGET's and LANDER's"]
        published = ("published", "task") if row.method == "fedewc" else (None, None)
        assert (keys.get("method.variant"), keys.get("method.loss_classes")) == published


def test_data_free_baselines_are_trained_as_the_text_says(frame, text):
    """E.2 names a schedule for Tiny-ImageNet alone; on CIFAR-100 LANDER keeps its own, as its configuration has it."""
    assert "we follow the configurations from Tran et al. (2024)" in text
    assert "reduces the learning rate by a factor of 10 at the 50th and 75th communication rounds" in text
    for row in frame[frame["row"].isin(["MFCL", "LANDER"])].itertuples():
        keys = overrides(row.setting)
        assert keys["method.training.weighting"] == "uniform"
        schedule = keys.get("method.training.schedule"), keys.get("method.training.milestones")
        if row.data == "tiny_imagenet":
            assert schedule == ("step", "[50,75]")
            assert float(keys.get("method.training.decay", 0.1)) == 0.1
        else:
            assert schedule == ("constant" if row.method == "mfcl" else None, None)
        [said] = left_to_us(row.setting)
        assert said.startswith("code unknown, ")
        # Table 5 counts the images that LANDER's public code sends.
        assert keys.get("method.variant") == {"lander": "published", "mfcl": None}[row.method]


def test_the_backbone_is_the_tables(frame):
    vit = (frame["table"].isin(["Table 2", "Table 3"])) | frame["column"].str.startswith("ViT-B/16")
    assert (frame["backbone"].str.startswith("vit_b16") == vit).all()
    adapters = frame["backbone"] == "vit_b16_stsa"
    own = frame["row"].isin(["STSA", "STSA-E"])
    assert (adapters == (vit & own)).all()
    scratch = frame["data"].map({"tiny_imagenet": "resnet18_tiny_imagenet"}).fillna("resnet18_cifar")
    assert (frame["backbone"] == scratch)[~vit].all()


def test_what_the_text_leaves_open_of_the_first_stage_is_the_public_codes(frame, text):
    """One schedule is named, Tiny-ImageNet's; no momentum but CIFAR-100's; no weights of the average, no pixels."""
    details = text[text.index("E.2. Client Training Details") : text.index("E.3. Additional Results")]
    assert len(re.findall("scheduler|cosine", details)) == 1
    assert details.count("momentum") == 1
    assert not re.search("average|weighted|normaliz|standardi[sz]|stem|augment", details)
    for row in frame[frame["setting"].str.contains("adapt=fedavg")].itertuples():
        keys = overrides(row.setting)
        tiny, vit = row.data == "tiny_imagenet", row.backbone == "vit_b16_stsa"
        schedule = ("step", "[50,75]") if tiny else ("cosine", None)
        assert (keys["adapt.training.schedule"], keys.get("adapt.training.milestones")) == schedule
        assert (keys["adapt.training.momentum"], keys["adapt.training.weighting"]) == ("0.9", "uniform")
        ours = ["average"] + ["momentum"] * (tiny or vit) + ["schedule"] * (not tiny) + ["stem"] * (not vit)
        ours += ["pixels"] * (tiny or vit)
        [said] = left_to_us(row.setting)
        assert re.findall(r"\w+", said.partition(" as in")[0].replace(" and", "")) == ours


def test_the_settings_are_those_of_the_text(frame, text):
    """Section 3.1's M, K_D, gamma, T and K; E.2's training; Section 3.4's split."""
    M = re.search(r"dimension of the random feature M is set to (\d+) for ResNet18 and (\d+) for ViT", text).groups()
    K_D = re.search(r"dummy clients K_D is set to (\d+) for ResNet18, (\d+) for ViT", text).groups()
    gamma = re.search(r"ridge coefficient is set to \$(\w+)\$ for ResNet18 and \$(\w+)\$ for ViT", text).groups()
    T, K = re.search(r"(\d+) non-overlapping tasks .*? among (\d+) clients", text).groups()
    large = re.search(r"CIFAR100 dataset into (\d+) tasks: the base task .*? contains (\d+) classes", text).groups()
    rounds = re.search(r"runs for (\d+) communication rounds on CIFAR100 .*? and (\d+) communication rounds", text)
    scratch = re.search(r"batch size of (\d+) for (\d+) communication rounds, with (\d+) local training", text)
    rates = [re.search(rf"{start}.*?learning rate of ([\d.]+)", text)[1] for start in ("CIFAR100 .Kriz.*?SGD",)]
    rates += [re.search(r"For Tiny-ImageNet .*?learning rate of ([\d.]+)", text)[1]]
    rates += [re.search(r"clients' local training, we use a learning rate of ([\d.]+)", text)[1]]
    for row in frame.itertuples():
        keys, vit = overrides(row.setting), row.backbone.startswith("vit")
        assert (row.tasks, row.clients) == (large[0] if row.table == "Table 4" else T, K)
        assert keys.get("split.first") == (large[1] if row.table == "Table 4" else None)
        if row.method == "centralised":
            continue
        group = "adapt" if row.method.startswith("stsa") else "method"
        if group == "adapt":
            assert keys["method.M"] == M[vit]
            assert float(keys["method.gamma"]) == float(gamma[vit])
            assert keys.get("method.dummy_clients") == (K_D[vit] if row.method == "stsa_e" else None)
        if "+" in row.row:
            assert keys["adapt"] == {"PLoRA": "pilora", "Fed-CPrompt": "cprompt"}[row.row.split("+")[1]]
        training = {key.partition(".training.")[2]: value for key, value in keys.items() if ".training." in key}
        assert all(key.startswith(group) for key in keys if ".training." in key)
        wanted = rounds[1 + (row.data == "imagenet_r")] if vit else scratch[2]
        assert (training["rounds"], training["epochs"], training["batch_size"]) == (wanted, scratch[3], scratch[1])
        if "+" in row.row:
            assert "lr" not in training  # it is not said
        elif group == "adapt" or not vit:
            assert training["lr"] == rates[2 if vit else row.data == "tiny_imagenet"]


def test_the_differences_that_the_text_says(frame):
    """What STSA-E and STSA gain over LANDER at beta 0.5 (Section 3.2)."""
    scratch = frame[frame["table"] == "Table 1"].set_index(["row", "column"])["number"]
    for dataset, metric, gains in (("CIFAR100", "A_avg", (3.48, 4.42)), ("Tiny-ImageNet", "A_T", (3.43, 3.4))):
        column = f"{dataset} / β = 0.5 / {metric}"
        for row, gain in zip(("STSA-E", "STSA"), gains, strict=True):
            assert scratch[row, column] - scratch["LANDER", column] == pytest.approx(gain, abs=1e-9)


def test_tables_3_and_2_agree_where_they_repeat_each_other(frame):
    again = {"PLoRA": "PILoRA", "Fed-CPrompt": "Fed-CPrompt", "STSA-E": "STSA-E", "STSA": "STSA"}
    table_2 = frame[frame["table"] == "Table 2"].set_index(["row", "column"])["value"]
    for row in frame[(frame["table"] == "Table 3") & frame["row"].isin(again)].itertuples():
        assert row.value == table_2[again[row.row], f"CIFAR100 / β = 0.5 / {row.column.split(' / ')[1]}"]


@pytest.mark.parametrize("number", [5, 6, 7, 9])
def test_of_figures_5_to_7_and_9_the_copy_has_no_more_than_captions(text, frame, number):
    """If a better copy brings their numbers, this fails and they can be typed in."""
    blocks = [line for line in text.splitlines() if re.match(rf"\s*Figure {number}\. ", line)]
    assert len(blocks) == 1
    assert not re.search(r"\d+\.\d+", blocks[0].split(". ", 1)[1])
    assert not (frame["table"] == f"Figure {number}").any()
