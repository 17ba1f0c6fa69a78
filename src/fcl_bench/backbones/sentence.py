"""Sentence transformers: frozen networks that make one vector of a text, from the hub or a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

from fcl_bench.backbones.backbone import Backbone, Extractor, require_kind, weights_hash
from fcl_bench.config import knob
from fcl_bench.data.sources.base import Dataset, Split
from fcl_bench.data.sources.hub import cache_unless_reachable
from fcl_bench.errors import UserError, first_line, installing
from fcl_bench.files import content_hash, user_path


@dataclass
class Sentence(Backbone):
    """A model of the package sentence-transformers, by its name on the hub or from a local folder."""

    name: str = knob(filled=True, words="backbone.name=sentence-transformers/all-MiniLM-L6-v2")
    folder: str | None = knob(None, identity=False)
    tokens: int | None = knob(None, least=1)

    def open(self, dataset: Dataset, device: torch.device, seed: int = 0) -> Extractor:
        require_kind("texts", self.name, dataset)
        disable_progress_bars()  # transformers asks once, for bars of its own
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise UserError("backbone=sentence needs sentence-transformers", installing("text")) from error
        enable_progress_bars()
        place = str(user_path("backbone.folder", self.folder)) if self.folder else self.name
        key = f"backbone.folder={self.folder}" if self.folder else f"backbone.name={self.name}"
        with cache_unless_reachable() as why:
            try:
                model = SentenceTransformer(place, device=str(device), local_files_only=bool(self.folder or why))
            except Exception as error:  # the hub's client, tokenizers, safetensors and torch raise many kinds
                reason = why if why and not self.folder else first_line(error)
                raise UserError(f"{key} cannot be loaded: {reason}", "backbone.folder=FOLDER with the model") from error
        model.max_seq_length = self.tokens or model.max_seq_length
        return SentenceExtractor(model, device)


class SentenceExtractor(Extractor):
    """A sentence transformer over texts, sorted by length within each batch."""

    cacheable = True
    batch = 256

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model.eval().requires_grad_(False)
        modules = [(type(module).__name__, str(getattr(module, "pooling_mode", ""))) for module in model]
        vocabulary = json.dumps(model.tokenizer.get_vocab(), sort_keys=True)
        self.identity = {
            "weights": weights_hash(model),
            "modules": str(modules),
            "vocabulary": content_hash(vocabulary.encode()).hexdigest(),
            "tokens": str(model.max_seq_length),
            "device": device.type,
        }

    def dimension(self, split: Split) -> int:
        return len(self._model.encode("a"))

    def batches(self, split: Split, start: int = 0) -> Iterator[torch.Tensor]:
        assert isinstance(split.inputs, np.ndarray)
        for begin in range(start, len(split), self.batch):
            texts = list(split.inputs[begin : begin + self.batch])
            made = self._model.encode(texts, batch_size=32, show_progress_bar=False, convert_to_tensor=True)
            yield made.to("cpu", torch.float32)
