"""fedprotip.csv against a second reading of FedProTIP's text: its tables are tab-separated lines there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.methods.projection.fot import FOT
from fcl_bench.papers.matching import NO_METHOD, left_to_us, words_without_key
from fcl_bench.results.measures import by_task
from tests.conftest import shared
from tests.papers.reading import Cells, as_typed, cells, compose_all, grid, numbers, numbers_typed, printed_by
from tests.papers.settings import overrides


class Shape(NamedTuple):
    """Lines of headings and columns of names in a table, and what our file writes before a name or a heading."""

    headings: int
    names: int = 1
    row: str = ""
    column: str = ""


TABLES = {
    "Table 1": Shape(3),
    "Table 2": Shape(3),
    "Table 3": Shape(3),
    "Table 5": Shape(2),
    "Table 6": Shape(2),
    "Table 7": Shape(2),
    "Table 8": Shape(2, row="m_s = "),
    "Table 9": Shape(1, column="Task / "),
    "Table 10": Shape(1, names=2),
    "Table 11": Shape(2, names=2),
    "Table 12": Shape(3),
    "Table 13": Shape(3),
    "Table 14": Shape(1),
    "Table 15": Shape(2),
    "Table 16": Shape(1, names=2),
    "Table 17": Shape(3),
    "Table 19": Shape(2, row="s_l = "),
}
METHODS = {
    **{"FedAvg": "fedavg", "FOT": "fot", "FedProTIP (-t)": "fedprotip", "FedProTIP": "fedprotip"},
    **{"GLFC": "glfc", "LGA": "lga", "TARGET": "target", "LANDER": "lander", "Target": "target", "Lander": "lander"},
    **{"Fed+PEC": "", "Fed+SCR": "", "Tar+LODE": ""},
}
#: Tables that do not say alpha and whose numbers repeat those of Table 1 at 0.5.
REPEATING = ("Table 5", "Table 8", "Table 16")
#: Of a network that E.2 does not speak of: its first stages that are frozen, from the public code.
FROZEN = {"Table 6": "0", "Table 7": "6"}
#: Settings that E.3 has for all baselines and that are no default of LANDER's.
AS_ALL = {"lander": {"schedule": "constant"}}
DATA = {"CIFAR100": "cifar100", "ImageNet-R": "imagenet_r", "DomainNet": "domainnet"}
METRICS = {"ACC": "A_T_tasks", "FT": "forgetting_fedprotip"}
#: What the paper prints where a method does not apply.
NONE = {"-", "–", "—", "\\star"}


@pytest.fixture(scope="module")
def text() -> str:
    return shared("papers/fedprotip.txt").read_text()


@pytest.fixture(scope="module")
def frame():
    return printed_by("fedprotip")


def reading(text: str, table: str) -> Cells:
    """(row, column) -> cell, as our file lays the table out."""
    shape = TABLES[table]
    found = cells(grid(text, f"{table}: "), shape.headings, shape.names)
    if table in ("Table 10", "Table 16"):  # the method is the second of two names
        names = {name: name.split(" / ") for name, _ in found}
        size = "Batch Size " if table == "Table 10" else ""
        found = {(names[name][1], f"{size}{names[name][0]} / {path}"): cell for (name, path), cell in found.items()}
    if table == "Table 5":
        found = dict(part for path, cell in found.items() for part in with_gain(*path, cell))
    return {(shape.row + row, shape.column + path): cell for (row, path), cell in found.items() if cell not in NONE}


def with_gain(row: str, path: str, cell: str) -> Iterator[tuple[tuple[str, str], str]]:
    """ "86.00 ↑ 37.19" is a number, and what it is more than another one; with an arrow down, less."""
    number, *gain = re.split(r" ([↑↓]) ", cell)
    path = path.removesuffix(" Δ")
    yield (row, path), number
    if gain:
        yield (row, f"{path} / Δ"), {"↑": "", "↓": "-"}[gain[0]] + gain[1]


@pytest.mark.parametrize("table", TABLES)
def test_every_cell_is_there_as_printed_and_nothing_else(frame, text, table):
    assert as_typed(frame, table) == reading(text, table)


@pytest.mark.parametrize("table", TABLES)
def test_as_many_numbers_as_in_the_text(frame, text, table):
    rows = grid(text, f"{table}: ")
    assert numbers_typed(frame, table) == numbers(rows, TABLES[table].headings, TABLES[table].names) > 0


def test_no_other_table(frame):
    assert set(frame["table"]) == set(TABLES)


def test_data_and_number_of_tasks_are_those_of_the_headings(frame, text):
    overlap = re.search(
        r"classes per task, (\d+) tasks total\) and \(ii\).*? classes per task, (\d+) tasks total", text
    )
    for row in frame.itertuples():
        caption = next(line for line in text.splitlines() if line.startswith(f"{row.table}: "))
        # The headings of Tables 12 and 13 have 20 splits of DomainNet, their captions its six domains.
        named = caption if row.table in ("Table 12", "Table 13") else f"{row.row} / {row.column}"
        found = re.search(rf"(\d+)-[Ss]plit ({'|'.join(DATA)})", named)
        if row.table == "Table 15":
            shared_classes = int(row.row[0])
            assert (row.data, row.tasks) == ("cifar100", overlap[shared_classes])
            assert overrides(row.setting)["split.shared"] == str(shared_classes)
            continue
        if found is None:
            assert row.table in REPEATING or re.search(r"10-[Ss]plit CIFAR-?100", caption)
        assert (row.data, row.tasks) == ((DATA[found[2]], found[1]) if found else ("cifar100", "10"))


def test_method_and_metric_are_the_headings(frame):
    for row in frame.itertuples():
        path = f"{row.column} / {row.row}"
        tip = {"FedProTIP": True, "FedProTIP (-t)": False}.get(row.row)
        if row.row not in METHODS:
            # A study of FedProTIP alone: a table's headings say which variant a number is of.
            tip = not re.search(r"Task-Agnostic|Task-Aware|Aware|Agnostic", path)
            method = {"Model": "fedavg", "Act": "fot"}.get(row.row, "fedprotip")
        else:
            method = METHODS[row.row]
            tip = "+TIP" in path if row.table == "Table 10" else tip and "Aware" not in path
        assert row.method == method
        keys = overrides(row.setting)
        if method == "fedprotip":
            # TIP routes whole batches of one task there (D.3); with the task given it has nothing to do.
            assert (keys.get("method.tip.route"), keys.get("method.tip")) == (
                ("batch", None) if tip else (None, "false")
            )
        else:
            assert not any(key.startswith("method.tip") for key in keys)
        quantity = [metric for heading, metric in METRICS.items() if re.search(rf"\b{heading}\b", row.column)]
        if row.table in ("Table 10", "Table 16"):
            quantity = ["A_T_tasks"]
        aware = "task_aware." if "Aware" in row.column else ""
        if row.column.endswith("Δ"):
            than = {"FedProTIP": "FedProTIP (-t)", "Tar+LODE": "TARGET"}[row.row]
            assert (row.unit, row.metric) == ("points", f"gain in {quantity[0]} over {than}")
            continue
        assert row.unit == "%" if quantity else row.unit in ("h", "MB", "share")
        if quantity:
            assert [row.metric] == [aware + quantity[0]]


def test_the_partition_is_the_heading(frame, text):
    """alpha stands in a heading or the caption, or is not said; of Tables 5, 8, 16 by what they repeat of Table 1."""
    captions = {table: next(line for line in text.splitlines() if line.startswith(f"{table}: ")) for table in TABLES}
    for row in frame.itertuples():
        where = row.column + captions[row.table].replace("\\alpha", "α").replace("$", "")
        alpha = re.search(r"α = ([\d.]+)", row.column) or re.search(r"α = ([\d.]+)", where)
        iid = "IID" in row.column.split(" / ")
        expected = "" if iid else alpha[1] if alpha else "0.5" if row.table in REPEATING else ""
        assert row.beta == expected
        keys = overrides(row.setting)
        assert keys["partition"] == ("iid" if iid else "dirichlet_all_classes")


def test_training_is_that_of_the_text(frame, text):
    """Appendix E.3, D.1 for the ViT, 6.4 for the clients that take part; batch sizes are Table 10's headings."""
    lr, batch = re.search(
        r"SGD optimizer with a learning rate of ([\d.]+) .*? the batch size is set to (\d+)", text
    ).groups()
    epochs, rounds, on_domainnet = re.search(
        r"the local epoch is fixed at (\d+) and the number of global rounds per task is (\d+) for CIFAR100"
        r" and ImageNet-R, and (\d+) for DomainNet",
        text,
    ).groups()
    (on_vit,) = re.search(r"number of local epochs to 5 and perform (\d+) global rounds per task", text).groups()
    shares = re.search(r"client fraction ([\d.]+) at each round for 5 clients, and ([\d.]+) and ([\d.]+) for", text)
    fraction = dict(zip(("5", "10", "20"), map(float, shares.groups()), strict=True))
    assert re.search(r"weight decay of +\$5 \\times 10\^\{-4\}\$", text)
    for row in frame.itertuples():
        keys = {key: value for key, value in overrides(row.setting).items() if key.startswith("method.training.")}
        size = re.search(r"Batch Size (\d+)", row.column)
        clients = re.fullmatch(r"10-Split CIFAR100 \(α = 0.5\) / (\d+) / \w+", row.column)
        assert row.clients == (clients[1] if clients else "5")
        wanted = on_domainnet if row.data == "domainnet" else on_vit if row.table == "Table 7" else rounds
        knobs = {key.rpartition(".")[2]: value for key, value in keys.items()}
        assert {key: knobs.pop(key) for key in AS_ALL.get(row.method, {})} == AS_ALL.get(row.method, {})
        assert {key: float(value) for key, value in knobs.items()} == {
            "rounds": int(wanted),
            "fraction": fraction[row.clients],
            "epochs": int(epochs),
            "batch_size": int(size[1] if size else batch),
            "lr": float(lr),
            "momentum": 0,  # of which the text has none; its public code has plain steps
            "weight_decay": 5e-4,
        }
        assert overrides(row.setting).get("method.tip.batch", keys["method.training.batch_size"]) == (
            size[1] if size else batch
        )


def test_the_methods_knobs_are_those_of_the_text(frame, text):
    """Thresholds: E.3, captions, headings. Columns: D.2. FOT: E.3. Sketches: Table 19's rows."""
    (default,) = re.search(r"We set the threshold +\$\\epsilon_t = ([\d.]+)\$ +for all datasets", text).groups()
    (columns,) = re.search(r"we use +\$m_s = (\d+)\$ +as the default", text).groups()
    (step,) = re.search(r"increase it by ([\d.]+) at each task boundary", text).groups()
    fot = re.search(r"starting value of ([\d.]+) with an increment of ([\d.]+) .*? use threshold ([\d.]+) with", text)
    assert "normal vector to five times the feature size" in text
    ours = [knobs.projected_heads or knobs.loss_classes != "task" for knobs in (FedProTIP(), FOT())]
    assert not any(ours)
    for row in frame[frame["method"].isin(["fedprotip", "fot"])].itertuples():
        keys = overrides(row.setting)
        assert (keys["method.frozen_stages"], keys["method.frozen_heads"]) == (FROZEN.get(row.table, "2"), "true")
        assert ("its public code's frozen stages" in left_to_us(row.setting)) == (row.table in FROZEN)
        # The text says neither whether heads are projected nor whose logits compete: our defaults, as in both codes.
        assert "heads free, the task's classes" in left_to_us(row.setting)
        assert not {"method.projected_heads", "method.loss_classes"} & keys.keys()
        if row.method == "fot":
            threshold = fot[1 if row.data == "cifar100" else 3]
            wanted = {"threshold": threshold, "threshold_step": fot[2], "sketch": "5", "columns": None}
        else:
            caption = next(line for line in text.splitlines() if line.startswith(f"{row.table}: "))
            named = re.search(r"epsilon_l = ([\d.]+)", caption)
            threshold = row.row.split(" / ")[1] if row.table == "Table 11" else named[1] if named else default
            sketch = row.row.removeprefix("s_l = ").replace("d_l", "layer") if row.table == "Table 19" else None
            wanted = {
                "threshold": threshold,
                "threshold_step": step,
                "sketch": sketch,
                "columns": row.row.removeprefix("m_s = ") if row.table == "Table 8" else columns,
            }
        assert {key: keys.get(f"method.{key}") for key in wanted} == wanted


def test_the_baselines_knobs_are_those_of_the_text(frame, text):
    """E.3: memories, rates of reconstruction, synthetic images; D.1: images for the ViT."""
    memory, limited = re.search(r"set the memory size to (\d+);.*?the memory size is limited to (\d+)", text).groups()
    rate, on_few = re.search(
        r"L-BFGS optimizer with a learning rate of ([\d.]+) for CIFAR100 and DomainNet, and ([\d.]+) for ImageNet-R",
        text,
    ).groups()
    images, batch = re.search(r"use (\d)k synthetic samples with a batch size of (\d+) for CIFAR100", text).groups()
    on_domainnet = re.search(
        r"For DomainNet, we generate ([\d,]+) synthetic samples in batches of (\d+), with (\d+) rounds of data"
        r" generation and (\d+) generator iterations",
        text,
    ).groups()
    on_imagenet_r = re.search(
        r"For ImageNet-R, we use ([\d,]+) synthetic samples with a batch size of (\d+), and set the data generation"
        r" process to (\d+) rounds with (\d+) generator iterations",
        text,
    ).groups()
    assert "we match the number of synthetic samples and data generation procedure used in TARGET" in text
    synthesis = {"cifar100": (f"{images}000", batch, None)}
    for data, (said, size, rounds, steps) in (("domainnet", on_domainnet), ("imagenet_r", on_imagenet_r)):
        made = int(rounds) * int(size)
        # On ImageNet-R 40 rounds of 64 are not the 12,800 images that are said.
        assert (made == int(said.replace(",", ""))) == (data == "domainnet")
        synthesis[data] = (str(made), size, steps)
    assert "generating synthetic images at the native  $32 \\times 32$  resolution and then applying resizing" in text
    for row in frame[frame["row"].isin({*METHODS} - {"FedAvg", "FOT", "FedProTIP (-t)", "FedProTIP"})].itertuples():
        keys = overrides(row.setting)
        if row.method in ("glfc", "lga"):
            wanted = (limited, on_few) if row.data == "imagenet_r" else (memory, rate)
            assert (keys["method.memory"], keys["method.inversion.lr"]) == wanted
        if row.method == "target":
            knobs = tuple(keys.get(f"method.synthesis.{key}") for key in ("images", "batch", "g_steps"))
            assert knobs == synthesis[row.data]
        if row.method == "lander":
            # On CIFAR-100 as its own paper has it.
            knobs = tuple(keys.get(f"method.synthesis.{key}") for key in ("images", "batch", "g_steps"))
            assert knobs == (synthesis[row.data] if row.data != "cifar100" else (None, None, None))
            assert row.table == "Table 7" or left_to_us(row.setting)[0].endswith("random anchors")
        no_key = ["images made at 32 pixels, then resized"] if row.table == "Table 7" else []
        assert row.method == "" or words_without_key(row.setting) == no_key


def test_the_split_is_that_of_the_text(frame, text):
    orders = [
        re.search(rf"ordering {n} \(([^)]*)\)", text)[1].replace(" $\\rightarrow$ ", ",").replace(" ", "")
        for n in (1, 2)
    ]
    for row in frame.itertuples():
        keys = overrides(row.setting)
        kind = {"domainnet": "domain_incremental"}.get(row.data, "class_incremental")
        assert keys["split"] == ("class_overlap" if row.table == "Table 15" else kind)
        if row.data == "domainnet":
            assert keys["split.order"] == f"[{orders[row.table == 'Table 13' or '(order 2)' in row.row]}]"


def test_the_backbone_is_the_captions(frame):
    cifar = {"Table 6": "resnet18_fedprotip_scratch", "Table 7": "vit_b16_fedprotip"}
    for row in frame.itertuples():
        assert row.backbone == (cifar.get(row.table, "resnet18_fedprotip") if row.data == "cifar100" else "resnet18")


def test_a_number_of_one_task_is_a_measure_of_that_task(frame):
    """Table 9: what is sent in the stage that the row names; Table 14: how often the task is right after it."""
    stages = {"Model": "model_mib", "Act": "bases_mib", "Base": "bases_mib", "Ref": "references_mib"}
    lost = frame["setting"].str.contains('"T1 to T10 or T11 to T20"')
    assert (lost.sum(), set(frame.loc[lost, "table"])) == (10, {"Table 14"})
    single = frame["table"].isin(["Table 9", "Table 14"]) & ~lost
    for row in frame[single].itertuples():
        of = by_task(row.metric)
        assert (of.last, of.task) == (stages.get(row.row, "routing"), int(re.search(r"\d+$", row.column)[0]))
        assert words_without_key(row.setting) == []
        assert ("after the task, of all so far" in left_to_us(row.setting)) == (row.table == "Table 14")
    assert not frame.loc[~single, "metric"].map(by_task).any()


def test_a_method_that_is_not_here_says_why(frame):
    none = frame[frame["method"] == ""]
    assert set(none["row"]) == {"Fed+PEC", "Fed+SCR", "Tar+LODE"}
    for setting in none["setting"]:
        [why] = words_without_key(setting)
        assert re.fullmatch(f"{NO_METHOD}: .{{20,}}", why)


@pytest.mark.slow
def test_a_command_line_takes_every_setting(frame):
    assert compose_all(frame) > 60


def test_where_tables_repeat_each_other_they_differ_only_as_the_readme_says(frame):
    """The settings of Tables 1 and 2 stand in nine more tables, mostly with the same number."""
    same = frame[~frame["table"].isin(["Table 6", "Table 7", "Table 9", "Table 14"]) & (frame["unit"] == "%")]
    same = same[same["method"] != ""]
    keys = same["setting"].map(lambda setting: str(sorted(overrides(setting).items())))
    tip = same["setting"].str.contains("tip.route").map({True: "FedProTIP", False: "FedProTIP (-t)"})
    name = same["row"].where(same["method"] != "fedprotip", tip)
    values = same.groupby([name, "metric", "data", "tasks", "beta", "clients", keys])["value"].agg(
        lambda group: sorted(set(group))
    )
    differing = [(*names[:-2], *found) for names, found in values.items() if len(found) > 1]
    assert differing == [
        ("FedProTIP", "A_T_tasks", "domainnet", "6", "0.5", "25.30", "28.85"),
        ("FedProTIP", "forgetting_fedprotip", "cifar100", "10", "", "0.34", "1.30"),
        ("FedProTIP", "forgetting_fedprotip", "cifar100", "10", "0.5", "0.83", "15.59"),
        ("FedProTIP", "forgetting_fedprotip", "domainnet", "6", "0.5", "3.76", "6.43"),
        ("FedProTIP (-t)", "A_T_tasks", "domainnet", "6", "0.5", "25.30", "28.85"),
        ("FedProTIP (-t)", "forgetting_fedprotip", "cifar100", "10", "0.5", "1.26", "15.59"),
        ("FedProTIP (-t)", "forgetting_fedprotip", "domainnet", "6", "0.5", "3.76", "6.43"),
        ("FedProTIP (-t)", "task_aware.forgetting_fedprotip", "cifar100", "10", "0.5", "0.96", "1.23"),
        ("GLFC", "A_T_tasks", "cifar100", "10", "0.5", "11.86", "22.86"),
        ("TARGET", "A_T_tasks", "cifar100", "10", "0.5", "27.37", "27.55"),
        ("TARGET", "A_T_tasks", "domainnet", "6", "0.5", "20.61", "20.62"),
    ]
    assert (values.map(len) == 1).sum() > 100
