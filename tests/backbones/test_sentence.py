"""backbone=sentence: batches, the cache's key, what is told where it cannot work; and a real model."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from fcl_bench.api import load, run
from fcl_bench.backbones.sentence import Sentence, SentenceExtractor
from fcl_bench.data.sources.base import Dataset, Split
from fcl_bench.errors import UserError

CPU = torch.device("cpu")


class Model(torch.nn.Sequential):
    """The part of SentenceTransformer that is used: the features of a text are its letters' counts, times a weight."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(torch.nn.Linear(26, 26, bias=False))
        self[0].weight.data = scale * torch.eye(26)
        self.max_seq_length = 256
        self.asked: list[int] = []

    @property
    def tokenizer(self):
        class Tokenizer:
            def get_vocab(self):
                return {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}

        return Tokenizer()

    def encode(self, texts, convert_to_tensor=False, **_):
        if isinstance(texts, str):
            return Model.encode(self, [texts])[0]
        self.asked.append(len(texts))
        counts = [[text[: self.max_seq_length].count(chr(97 + n)) for n in range(26)] for text in texts]
        made = self[0](torch.tensor(counts, dtype=torch.float32))
        return made if convert_to_tensor else made.numpy()


class Refusing(Model):
    """One that must not be asked for a text of the data: these are in the cache."""

    def encode(self, texts, **options):
        assert texts == "a"
        return super().encode(texts)


@pytest.fixture
def package(monkeypatch):
    """A stand-in for sentence-transformers, whose model's weights the caller may change."""
    made = ModuleType("sentence_transformers")
    made.scale = 1.0
    made.SentenceTransformer = lambda place, **_: Model(made.scale)
    monkeypatch.setitem(sys.modules, "sentence_transformers", made)
    return made


def split(texts: list[str]) -> Split:
    return Split(np.zeros(len(texts), dtype=np.int64), np.array(texts, dtype=object), "f")


def test_batches_hold_the_features_of_all_texts_from_any_batch_on():
    texts = [chr(97 + number % 26) * (1 + number % 5) for number in range(600)]
    whole = split(texts)
    extractor = SentenceExtractor(Model(), CPU)
    features = torch.cat(list(extractor.batches(whole)))
    wanted = np.array([[text.count(chr(97 + n)) for n in range(26)] for text in texts])
    np.testing.assert_array_equal(features.numpy(), wanted)
    assert extractor.dimension(whole) == 26
    assert torch.equal(torch.cat(list(extractor.batches(whole, 256))), features[256:])


def test_weights_and_length_are_part_of_the_key():
    made = [SentenceExtractor(Model(), CPU), SentenceExtractor(Model(2.0), CPU)]
    short = Model()
    short.max_seq_length = 3
    made.append(SentenceExtractor(short, CPU))
    assert len({str(one.identity) for one in made}) == 3
    assert made[0].identity == SentenceExtractor(Model(), CPU).identity


def write(path) -> None:
    rng = np.random.default_rng(0)
    letters = ["abc", "def", "ghi", "jkl"]
    rows = [(" ".join(rng.choice(list(letters[n % 4]), 6)), f"c{n % 4}") for n in range(200)]
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))


@pytest.mark.slow
def test_a_run_on_texts_extracts_once_and_its_model_takes_texts(package, tmp_path):
    write(tmp_path / "a.csv")
    keys = {"data": "text", "tasks": 2, "clients": 2, "out": str(tmp_path / "out")}
    keys |= {"data.path": str(tmp_path / "a.csv"), "backbone.folder": "anywhere"}
    first = run("afl", **keys)
    assert first.metrics["A_T"] == 100
    assert list((tmp_path / "out" / "cache").glob("text-train-*.safetensors"))
    package.SentenceTransformer = lambda place, **_: Refusing()
    assert run("fedncm", **keys).metrics["A_T"] == 100
    package.SentenceTransformer = lambda place, **_: Model(package.scale)
    assert load(first.path).predict(["a b c c", "k j l"]).tolist() == [0, 3]
    with pytest.raises(UserError, match="inputs are images, and the model was made on texts"):
        first.predict(np.zeros((1, 8, 8), dtype=np.uint8))
    package.scale = 2.0
    with pytest.raises(UserError, match="has other weights than the model was made with"):
        load(first.path).predict(["a"])


def test_what_is_missing_is_told_in_a_line(monkeypatch, package):
    texts = Dataset("text", split(["a"]), split(["a"]))

    def refuse(place, **_):
        raise OSError("no file named config.json\nand more")

    package.SentenceTransformer = refuse
    with pytest.raises(UserError, match=r"backbone.folder=/nowhere cannot be loaded: no file named config.json \("):
        Sentence("m", folder="/nowhere").open(texts, CPU)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(UserError, match=r"needs sentence-transformers \(.*pip install '.\[text\]'"):
        Sentence("m").open(texts, CPU)


@pytest.mark.slow
def test_a_model_that_the_package_saved_is_read_back(tmp_path):
    """A BERT of two small layers with random weights; skipped where the extra text is not installed."""
    transformers = pytest.importorskip("transformers")
    models = pytest.importorskip("sentence_transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **sizes))
    bert.save_pretrained(tmp_path / "bert")
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    models.SentenceTransformer(str(tmp_path / "bert"), device="cpu").save(str(tmp_path / "model"))
    texts = split(["a b", "c d e f", "j"] * 4)
    extractor = Sentence("mine", folder=str(tmp_path / "model")).open(Dataset("text", texts, texts), CPU)
    [features] = extractor.batches(texts)
    assert features.shape == (12, 16) == (12, extractor.dimension(texts))
    # The mean of the last layer's tokens, by transformers alone.
    tokens = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))("c d e f", return_tensors="pt")
    with torch.no_grad():
        wanted = bert.eval()(**tokens).last_hidden_state[0].mean(dim=0)
    torch.testing.assert_close(features[1], wanted, rtol=1e-4, atol=1e-5)
