"""Texts and tables of the user's: what is read of a file, the cut without a column split, and what bad files give."""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from fcl_bench.data.sources.rows import LabelledImages, LabelledTexts, Table

GOOD = "text,label\na,x\nb,x\nc,y\nd,y\ne,x\nf,y\n"


def texts(path, **knobs) -> LabelledTexts:
    return LabelledTexts("text", path=str(path), **knobs)


def table(path, **knobs) -> Table:
    return Table("table", path=str(path), **knobs)


def frame(rows: int = 60) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    numbers = rng.normal(3, 2, (rows, 3))
    numbers[:, 2] = 7  # a constant column
    return pd.DataFrame(numbers, columns=["a", "b", "c"]).assign(label=np.arange(rows) % 3 + 4)


def test_the_three_formats_hold_the_same_texts(tmp_path):
    rows = pd.DataFrame({"text": [f"t {n}, «ü»\n猫" for n in range(20)], "label": ["NA", "on"] * 10})
    rows.to_csv(tmp_path / "a.csv", index=False)
    rows.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    rows.to_parquet(tmp_path / "a.parquet")
    made = [texts(tmp_path / f"a.{suffix}").load() for suffix in ("csv", "jsonl", "parquet")]
    assert len({one.fingerprint for one in made}) == 1
    assert (made[0].kind, made[0].class_names) == ("texts", ("NA", "on"))
    assert sorted([*made[0].train.inputs, *made[0].test.inputs]) == sorted(rows["text"])


def test_a_fifth_of_each_class_is_tested_whatever_the_order_and_equal_texts_stay_together(tmp_path):
    rows = pd.DataFrame({"text": [f"t{n // 2}" for n in range(100)], "label": np.arange(100) // 50})
    held = []
    for name, order in (("a", rows), ("b", rows.iloc[::-1])):
        order.to_csv(tmp_path / f"{name}.csv", index=False)
        data = texts(tmp_path / f"{name}.csv").load()
        assert not set(data.train.inputs) & set(data.test.inputs)
        assert np.bincount(data.test.labels).tolist() == [10, 10]
        held.append(set(data.test.inputs))
    assert held[0] == held[1]


def test_columns_split_task_and_client_are_taken_over(tmp_path):
    rows = {"text": list("abcdef"), "label": [3, 3, 12, 12, 3, 12], "task": [10, 2, 10, 2, 2, 10]}
    rows |= {"split": ["train"] * 4 + ["test"] * 2, "client": ["bob", "ann", "ann", "bob", None, None]}
    pd.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    data = texts(tmp_path / "a.parquet").load()
    assert (data.class_names, data.domain_names) == (("3", "12"), ("2", "10"))
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 0, 1, 1], [0, 1])
    assert (data.train.domains.tolist(), data.test.domains.tolist()) == ([1, 0, 1, 0], [0, 1])
    assert data.train.clients.tolist() == [1, 0, 0, 1]


def test_a_table_is_standardised_by_sums_of_the_training_rows(tmp_path):
    rows = frame().assign(split=["train"] * 45 + ["test"] * 15)
    rows.to_csv(tmp_path / "a.csv", index=False)
    data = table(tmp_path / "a.csv").load()
    # As five clients' sums would give it.
    parts = np.array_split(rows[["a", "b", "c"]].to_numpy()[:45], 5)
    n = sum(map(len, parts))
    mean = sum(part.sum(axis=0) for part in parts) / n
    deviation = np.sqrt(sum((part**2).sum(axis=0) for part in parts) / n - mean**2)
    wanted = (rows[["a", "b"]].to_numpy() - mean[:2]) / deviation[:2]
    np.testing.assert_allclose(data.train.inputs[:, :2], wanted[:45], rtol=1e-9)
    np.testing.assert_allclose(data.test.inputs[:, :2], wanted[45:], rtol=1e-9)
    assert not data.train.inputs[:, 2].any()
    raw = table(tmp_path / "a.csv", standardise="none").load()
    np.testing.assert_array_equal(raw.test.inputs, rows[["a", "b", "c"]].to_numpy()[45:])


def test_a_class_can_be_left_out(tmp_path):
    frame().to_csv(tmp_path / "a.csv", index=False)
    data = table(tmp_path / "a.csv", leave_out="5").load()
    assert data.class_names == ("4", "6")
    assert len(data.train) + len(data.test) == 40


def picture(grey: int) -> bytes:
    """A PNG of four pixels."""
    content = io.BytesIO()
    Image.fromarray(np.full((2, 2), grey, dtype=np.uint8)).save(content, "PNG")
    return content.getvalue()


def archive(path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def greys(split) -> list[int]:
    return [image.getpixel((0, 0)) for image in split.inputs.decoded(range(len(split)))]


def test_images_in_one_parquet_file_are_cut_like_other_rows(tmp_path):
    rows = pd.DataFrame(
        {"image": [picture(grey) for grey in range(40)], "label": ["b", "a"] * 20, "client": [3, 5] * 20}
    )
    rows.to_parquet(tmp_path / "a.parquet")
    data = LabelledImages("imagetable", path=str(tmp_path / "a.parquet")).load()
    assert (data.kind, data.class_names, np.bincount(data.test.labels).tolist()) == ("images", ("a", "b"), [4, 4])
    for split in (data.train, data.test):
        assert split.labels.tolist() == [(grey + 1) % 2 for grey in greys(split)]
        assert [split.inputs[n].getpixel((0, 0)) for n in range(len(split))] == greys(split)
    assert sorted(greys(data.train) + greys(data.test)) == list(range(40))
    assert data.train.clients.tolist() == [grey % 2 for grey in greys(data.train)]
    left = LabelledImages("imagetable", path=str(tmp_path / "a.parquet"), leave_out="c").load()
    assert left.fingerprint == data.fingerprint


def test_images_in_shards_of_each_side_are_those_of_the_archives(tmp_path):
    for side, begin in (("train", 0), ("test", 20)):
        for shard in range(2):
            rows = range(begin + 10 * shard, begin + 10 * shard + 10)
            members = {
                f"{n:03}.{end}": made for n in rows for end, made in (("png", picture(n)), ("cls", b"%d" % (n % 3)))
            }
            archive(tmp_path / f"{side}-{shard:06}.tar", members)
    knobs = {"image_column": "png", "label_column": "cls"}
    data = LabelledImages("imagetable", path=str(tmp_path), **knobs).load()
    assert (greys(data.train), greys(data.test)) == (list(range(20)), list(range(20, 40)))
    assert data.test.labels.tolist() == [n % 3 for n in range(20, 40)]
    some = LabelledImages("imagetable", path=str(tmp_path), leave_out="1", **knobs).load()
    assert greys(some.test) == [n for n in range(20, 40) if n % 3 != 1]


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({}, "not a readable webdataset file"),
        ({"a.png": b"x", "a.cls": b"cat", "b.png": b"x", "b.cls": b"dog"}, "not a readable webdataset file"),
        ({"a.png": b"x", "b.png": b"x"}, "no column cls in it (choices: __key__, __url__, png)"),
        ({"a.cls": b"1", "b.cls": b"2"}, "no column png in it"),
        ({"a.png": b"x", "a.cls": b"1", "b.png": b"y", "b.cls": b"1"}, "has 2 rows of 1 classes"),
        ({f"{n}.{end}": b"%d" % n for n in range(4) for end in ("cls", "png")}, "no training row has the label 0"),
    ],
)
def test_a_bad_archive_is_one_line_and_exit_2(command, tmp_path, members, told):
    archive(tmp_path / "a.tar", members)
    keys = ("data=imagetable", f"data.path={tmp_path}/a.tar", "data.image_column=png", "data.label_column=cls")
    code, out, err = command(*keys, "backbone=tiny", f"out={tmp_path}/out")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert told in err


def test_a_file_that_is_no_archive_and_an_image_that_is_none_are_named(command, tmp_path):
    (tmp_path / "a.tar").write_bytes(b"\xff" * 4096)
    keys = ("data=imagetable", f"data.path={tmp_path}/a.tar", "data.image_column=png", "data.label_column=cls")
    assert "a.tar in " in (told := command(*keys)[2])
    assert "not a readable webdataset file: " in told
    rows = {f"{n}.{end}": b"%d" % (n % 2) if end == "cls" else b"no%d" % n for n in range(40) for end in ("cls", "png")}
    archive(tmp_path / "a.tar", rows)
    code, _, err = command(*keys, "backbone=tiny", "tasks=2", "clients=2", f"out={tmp_path}/out")
    assert code == 2
    assert "cannot be read: not an image in PNG" in err


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


#: data, file, its content (None: no such file) -> what the one line must hold.
BAD = [
    ("text", "none.csv", None, "does not exist"),
    ("text", "empty.csv", b"", "not a readable csv file"),
    ("text", "header.csv", b"text,label\n", "not a readable csv file"),
    ("text", "file.txt", GOOD.encode(), "is of another kind (a file that ends in .csv, .jsonl, .parquet)"),
    ("text", "good.json", b"[]", "is of another kind"),
    ("text", "column.csv", GOOD.replace("text", "words").encode(), "no column text in it (choices: label, words)"),
    ("text", "labels.csv", GOOD.replace("label", "class").encode(), "no column label in it (choices: class, text)"),
    ("text", "blank.csv", GOOD.replace("b,x", ",x").encode(), "column text holds no text in row 2"),
    ("text", "spaces.csv", GOOD.replace("b,x", "   ,x").encode(), "column text holds an empty text in row 2"),
    ("text", "unlabelled.csv", GOOD.replace("c,y", "c,").encode(), "column label is empty in row 3"),
    ("text", "one.csv", b"text,label\na,x\nb,x\n", "has 2 rows of 1 classes"),
    ("text", "latin.csv", GOOD.encode().replace(b"c,y", b"\xe9,y"), "not a readable csv file"),
    ("text", "long.csv", GOOD.replace("c,y", "c,y,z").encode(), "not a readable csv file"),
    ("text", "numbers.csv", b"text,label\n1,x\n2,y\n3,x\n4,y\n", "column text holds no text in row 1"),
    ("text", "decimals.csv", b"text,label\na,0.5\nb,1.5\n", "column label holds decimals"),
    ("text", "broken.jsonl", b'{"text": "a", "label": "x"}\n{"text": \n', "not a readable json file"),
    ("text", "lists.jsonl", lines({"text": ["a"], "label": "x"}, {"text": ["b"], "label": "y"}).encode(), "no text in"),
    ("text", "text.parquet", GOOD.encode(), "not a readable parquet file"),
    (
        "text",
        "split.csv",
        b"text,label,split\na,x,train\nb,y,dev\n",
        "column split holds something else than train and",
    ),
    ("text", "unseen.csv", b"text,label,split\na,x,train\nb,y,test\nc,z,train\n", "no training row has the label y"),
    (
        "text",
        "client.csv",
        b"text,label,split,client\na,x,train,1\nb,y,train,\nc,x,test,\n",
        "client is empty in row 2",
    ),
    ("text", "task.csv", b"text,label,task\na,x,1\nb,y,\nc,x,1\nd,y,1\n", "column task is empty in row 2"),
    ("table", "nan.csv", b"v,label\n1,x\nNaN,y\n3,x\n", "column v holds no finite number in row 2"),
    ("table", "blank.csv", b"v,label\n1,x\n,y\n3,x\n", "column v holds no finite number in row 2"),
    ("table", "infinite.csv", b"v,label\n1,x\n2,y\ninf,x\n", "column v holds no finite number in row 3"),
    ("table", "words.csv", b"v,w,label\n1,2,x\n2,tall,y\n", "column w holds no finite number in row 2"),
    ("table", "bare.csv", b"label,split\nx,train\ny,train\n", "has no column of numbers"),
    ("table", "x.npz", b"", "data=features data.path="),
]


@pytest.mark.parametrize(("data", "name", "content", "told"), BAD, ids=[f"{data} {name}" for data, name, *_ in BAD])
def test_a_bad_file_is_one_line_and_exit_2(command, tmp_path, data, name, content, told):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, out, err = command(f"data={data}", f"data.path={tmp_path / name}", "method=afl", f"out={tmp_path}/out")
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert line.startswith(f"fcl-bench: error: data.path={tmp_path / name}")
    assert told in line
    assert not (tmp_path / "out" / "runs").exists()


#: What was typed beside a good file -> what the one line must hold.
REFUSED = [
    ("data=text method=fedavg", "has nothing to train (method.trains=features where the method has it"),
    ("data=text adapt=fedavg", "has nothing to train (method.trains=features where the method has it"),
    (
        "data=text backbone=tiny method=fedavg",
        "backbone=tiny needs images and data=text holds texts (backbone=sentence)",
    ),
    ("data=text backbone=identity", "needs ready features and data=text holds texts (backbone=sentence)"),
    ("data=text", "no column text in it"),
    ("data=table backbone=sentence", "needs texts and data=table holds features (backbone=identity)"),
    ("data=table split=given", "split=given: data=table gives no tasks (data=sites, a column task, or another split)"),
    ("data=table partition=given", "partition=given: the data set names no clients (a file with a column client)"),
    ("data=table data.standardise=all", "data.standardise=all is not known"),
    ("data=table data.label_column=lable", "no column lable in it (did you mean label?"),
    ("data=table data.path=", "data=table needs data.path"),
]


@pytest.mark.parametrize(("typed", "told"), REFUSED, ids=[typed for typed, _ in REFUSED])
def test_what_does_not_suit_the_data_is_one_line_and_exit_2(command, tmp_path, typed, told):
    if "holds texts" in told or "train" in told:
        (tmp_path / "a.csv").write_text(GOOD)
    else:
        frame().to_csv(tmp_path / "a.csv", index=False)
    keys = [
        f"data.path={tmp_path / 'a.csv'}",
        "method=afl",
        "tasks=2",
        "clients=2",
        *typed.split(),
        f"out={tmp_path}/out",
    ]
    keys = [
        key
        for key in keys
        if key.partition("=")[0] not in {one.partition("=")[0] for one in keys[keys.index(key) + 1 :]}
    ]
    code, _, err = command(*keys)
    assert code == 2
    [line] = err.splitlines()
    assert told in line


def test_given_tasks_and_clients_are_those_of_the_file(command, tmp_path):
    rows = frame(90).assign(task=lambda rows: (rows["label"] == 6).astype(int), client=[0, 1, 2, 1, 2, 2] * 15)
    rows.to_parquet(tmp_path / "a.parquet")
    keys = ("data=table", f"data.path={tmp_path}/a.parquet", "split=given", "partition=given", "tasks=2", "clients=3")
    assert command(*keys, "method=afl", f"out={tmp_path}/out")[0] == 0
    [run] = (tmp_path / "out" / "runs").glob("*/partition.npz")
    data = table(tmp_path / "a.parquet").load()
    with np.load(run) as dealt:
        for task in range(2):
            for client in range(3):
                own = dealt[f"train_t{task}_c{client}"]
                wanted = np.flatnonzero((data.train.domains == task) & (data.train.clients == client))
                np.testing.assert_array_equal(own, wanted)
