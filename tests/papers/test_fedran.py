"""fedran.csv against a second reading of FedRAN's text, of which the tables are lost and sentences are left."""

from __future__ import annotations

import re

import pytest

from tests.conftest import shared
from tests.papers.reading import printed_by
from tests.papers.settings import overrides

#: Section -> the table or figure that it tells of.
SECTIONS = {1: "Table 3", 2: "Table 4", 3: "Table 5", 4: "Figure 5", 5: "Figure 6", 6: "Figure 7", 7: "Table 6"}
THREE = ("CIFAR-100", "ImageNet-R", "VTAB")
DATA = {"CIFAR-100": "cifar100", "ImageNet-R": "imagenet_r", "VTAB": "vtab"}
NUMBER = r"\d+\.\d+"

#: Sentence -> the cells (row, column) of its numbers, in order.
READINGS = {
    "Table 3": {
        r"gains in ?A_avg ?of up to ?(#) ?points on CIFAR-100, ?(#) ?points on ImageNet-R, and ?(#) ?points on VTAB": [
            ("Improvement", f"{name} / A_avg") for name in THREE
        ]
    },
    "Table 4": {
        r"TARGET, whose costs are ?(#)×, ?(#)×, and ?(#)× ?higher on CIFAR-100, ImageNet-R, and VTAB": [
            ("TARGET", f"{name} / relative cost") for name in THREE
        ],
        r"with STSA, FedRAN also reduces communication by ?(#)× ?on CIFAR-100 and ?(#)× ?on both ImageNet-R and VTAB": [
            ("STSA", f"{name} / relative cost") for name in THREE[:2]
        ],
        r"on CIFAR-100 and ?(#)× ?on both ImageNet-R and VTAB": [("STSA", "VTAB / relative cost")],
    },
    "Table 5": {
        r"FedRAN is on average ?(#)× ?faster, with ?(#)×, ?(#)×, and ?(#)× ?faster on CIFAR-100, ImageNet-R, and V": [
            ("FedRAN", f"{name} / times faster") for name in ("average", *THREE)
        ]
    },
    "Table 6": {
        r"improves ?A_avg ?by up to ?(#) ?percentage points on CIFAR-100 and ?(#) ?percentage points on ImageNet-R": [
            ("FedRAN", f"{name} / A_avg gain") for name in THREE[:2]
        ],
        r"On CIFAR-100, FedRAN requires ?(#) ?MB per client per task compared with ?(#) ?MB for STSA": [
            (row, "CIFAR-100 / communication") for row in ("FedRAN", "STSA")
        ],
        r"On ImageNet-R, FedRAN requires ?(#) ?MB compared with ?(#) ?MB for STSA": [
            (row, "ImageNet-R / communication") for row in ("FedRAN", "STSA")
        ],
    },
    "Figure 5": {
        r"20% ?of the data is labeled, improving ?A_avg ?by ?(#) ?on CIFAR-100, ?(#) ?on ImageNet-R, and ?(#) ?on VT": [
            ("FedRAN", f"{name} / 20% labelled / A_avg gain") for name in THREE
        ]
    },
    "Figure 6": {
        r"when ?M=2048, increasing ?r ?from ?256 ?to ?512 ?improves ?A_avg ?by ?(#)": [
            ("FedRAN", "M = 2048 / r = 512 / A_avg gain from r = 256")
        ],
        r"increasing ?r ?from ?1024 ?to ?2048 ?improves it by only ?(#), .*? doubles from ?(#) ?MB to ?(#) ?MB": [
            ("FedRAN", "M = 2048 / r = 2048 / A_avg gain from r = 1024"),
            ("FedRAN", "M = 2048 / r = 1024 / communication"),
            ("FedRAN", "M = 2048 / r = 2048 / communication"),
        ],
        r"at ?r=1024, ?A_avg ?increases from ?(#) ?at ?M=2048 ?to ?(#) ?at ?M=8192, .*? from ?(#) ?MB to ?(#) ?MB": [
            ("FedRAN", "M = 2048 / r = 1024 / A_avg"),
            ("FedRAN", "M = 8192 / r = 1024 / A_avg"),
            ("FedRAN", "M = 2048 / r = 1024 / communication"),
            ("FedRAN", "M = 8192 / r = 1024 / communication"),
        ],
    },
    "Figure 7": {
        r"without random projection, ReLU, and low-rank SVD, achieving (#)% accuracy": [
            ("no projection, no ReLU, no SVD", "A_avg")
        ],
        r"M=1250 ?using random projection .*? average accuracy to (#)%": [("+ random projection", "A_avg")],
        r"ReLU activation .*? accuracy to (#)%": [("+ ReLU", "A_avg")],
        r"average accuracy of (#)%\. Our ablation": [("+ low-rank SVD", "A_avg")],
    },
}


@pytest.fixture(scope="module")
def text() -> str:
    """The paper in one line, without links and escapes; of a formula, which the copy has twice, one reading."""
    raw = re.sub(r"\s+", " ", shared("papers/fedran.txt").read_text())
    raw = re.sub(r"\]\(https?://[^)]*\)", "]", raw)
    raw = re.sub(r"\\([^A-Za-z])", r"\1", raw)
    raw = raw.replace("AavgA_{\\mathrm{avg}}", "A_avg")
    for command, sign in {"times": "×", "beta": "β", "tau": "τ", "lambda": "λ", "%": "%"}.items():
        raw = raw.replace(f"\\{command}", sign)
    for twice in (rf"{NUMBER}[×%]?", r"\d{3,}", r"\d+%", r"[A-Zβτr]=\d+(?:\.\d+)?"):
        raw = re.sub(rf"(?<![\d.])({twice})\1(?!\.?\d)", r"\1", raw)
    return raw.replace("increasingrr", "increasing r ")


@pytest.fixture(scope="module")
def sections(text) -> dict[str, str]:
    """Table or figure -> the section that tells of it."""
    pieces = re.split(r"#### 5\.5\.(\d)\.|## 6\.Applications", text)
    return {SECTIONS[int(number)]: piece for number, piece in zip(pieces[1:15:2], pieces[2:15:2], strict=True)}


@pytest.fixture(scope="module")
def frame():
    return printed_by("fedran")


@pytest.mark.parametrize("table", list(READINGS))
def test_every_cell_is_what_its_sentence_says(frame, sections, table):
    ours = {(row.row, row.column): row.value for row in frame[frame["table"] == table].itertuples()}
    found: dict[tuple[str, str], str] = {}
    for sentence, cells in READINGS[table].items():
        match = re.search(sentence.replace("(#)", f"({NUMBER})"), sections[table])
        assert match, sentence
        for cell, number in zip(cells, match.groups(), strict=True):
            # 17.6 MB stands in two sentences.
            assert found.setdefault(cell, number) == number
    assert ours == found


@pytest.mark.parametrize("table", list(READINGS))
def test_the_section_has_no_further_number(frame, sections, table):
    """Its decimals, those of beta and tau aside."""
    there = set(re.findall(rf"(?<![\d.=])({NUMBER})", sections[table]))
    assert there == set(frame.loc[frame["table"] == table, "value"])


def test_the_tables_themselves_are_lost(text, frame):
    """If a better copy brings them, this fails and they can be typed in."""
    for number in range(3, 7):
        [caption] = re.findall(rf"Table {number}\.[A-Z].*?(?=####|## )", text)
        assert not re.search(r"\d+\.\d+", re.sub(r"5\.5\.\d", "", caption.split("Figure 5.")[0]))
    assert set(frame["table"]) == set(READINGS)


def test_the_settings_are_those_of_the_text(frame, text):
    M, r, vtab = re.search(
        r"dimensionM=(\d+) ?with rank ?r=(\d+) ?on CIFAR-100 .*? rank ?r=(\d+) ?on VTAB", text
    ).groups()
    vit = re.search(r"The ViT setting usesM=(\d+) ?andr=(\d+)", text).groups()
    tasks = re.search(r"CIFAR-100, we use (\d+) tasks in the ResNet setting and (\d+) tasks in the ViT", text).groups()
    assert "we useK=5clients" in text
    assert "λ=10−3" in text
    assert "threshold is set toτ=0.5" in text
    for row in frame.itertuples():
        keys, is_vit = overrides(row.setting), row.backbone.startswith("vit")
        assert row.clients == "5"
        assert is_vit == (row.table in ("Table 6", "Figure 7"))
        if row.data == "cifar100":
            assert row.tasks == tasks[is_vit]
        if row.table.startswith("Table") and row.method == "fedran" and row.data:
            size = vit if is_vit else (M, vtab if row.data == "vtab" else r)
            assert (keys["method.M"], keys["method.rank"]) == size
        if row.table == "Figure 6":
            assert row.column.startswith(f"M = {keys['method.M']} / r = {keys['method.rank']} / ")
        if row.table == "Figure 5":
            assert (keys["label_rate"], keys["method.ssl"], keys["method.tau"]) == ("0.2", "true", "0.5")
        if row.method == "fedran" and row.data:
            assert keys["method.ridge"] == "0.001"


def test_beta_is_that_of_the_section(frame, text, sections):
    betas = {
        "Figure 5": re.search(r"labeled data at ?β=(\d\.\d)", sections["Figure 5"])[1],
        "Figure 6": re.search(r"on CIFAR-100 with ?β=(\d\.\d)", sections["Figure 6"])[1],
        "Figure 7": re.search(r"backbone for ?β=(\d\.\d)", sections["Figure 7"])[1].removesuffix(".0"),
    }
    assert (frame["beta"] == frame["table"].map(betas).fillna("")).all()


def test_metric_and_data_say_what_the_headings_say(frame):
    ends = {
        "A_avg": ("A_avg", "%"),
        "communication": ("fedran_mib", "MB"),
        "relative cost": ("communication relative to FedRAN", "x"),
        "times faster": ("speed-up over the gradient-based baselines", "x"),
    }
    for row in frame.itertuples():
        first, last = row.column.split(" / ")[0], row.column.split(" / ")[-1]
        if row.table == "Table 3" or "gain" in last:
            assert row.metric.startswith("A_avg gain")
            assert row.unit == "points"
        else:
            assert (row.metric, row.unit) == ends[last]
        assert row.data == DATA.get(first, "" if first == "average" else "cifar100")
        assert row.method == {"TARGET": "target", "STSA": "stsa_e"}.get(row.row, "fedran")
