"""Prediction with a saved model, its method's server half restored from its file; and the samples it was tested on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fcl_bench import environment
from fcl_bench.backbones.backbone import Backbone, Extractor
from fcl_bench.backbones.network_extractor import require_compiler
from fcl_bench.config import HELD_OUT, target_class
from fcl_bench.data.images.batches import load_pixels
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import Dataset, Split, image_split, kind_of_inputs
from fcl_bench.data.sources.image_source import rows_of, samples_of
from fcl_bench.engine.evaluation import chosen, test_batches
from fcl_bench.engine.node import on_device
from fcl_bench.errors import UserError
from fcl_bench.execution.adapt import adapted_extractor
from fcl_bench.execution.model_file import ADAPTED, read_model, tasks_of
from fcl_bench.files import json_hash
from fcl_bench.linalg.tensors import rows_not_finite
from fcl_bench.options.none import NoOption
from fcl_bench.protocol.context import WIRE_DTYPES, Context, Prediction, TestBatch, WireFormat
from fcl_bench.typed import typed_instance


class Model:
    """The model of a run after its last task, from its file alone.

    It predicts with the code that the run was tested with: on the run's test samples and its kind of device, it gives
    the run's own final accuracy.

    Args:
        path: the file `model.safetensors` of a run's folder, wherever it lies.
        device: auto, cpu, cuda, cuda:N.

    Attributes:
        about: what the file says of itself: method, backbone, settings, tasks.
        labels: (C,) int64, the data set's label of each class, in the order of the columns of `scores`.
        class_names: (C,) str, their names; their labels as text where the data set has no names.

    Raises:
        UserError: there is no such file, it can't be read, or the device is not there.
    """

    def __init__(self, path: str | Path, device: str = "auto") -> None:
        self._device = environment.choose_device(device)
        self.about, tensors = read_model(Path(path), self._device)
        self._tasks = tasks_of(self.about)
        self.labels = np.array(self.about["labels"], dtype=np.int64)
        named = self.about["class_names"]
        self.class_names = np.array([named[label] if named else str(label) for label in self.labels])
        self._classes = [torch.tensor(task.columns, device=self._device) for task in self._tasks]
        self._tensors = tensors
        self._method = self._choice("method")
        #: Only where images are asked about: a method on features does without the network that they come from.
        self._extractor: Extractor | None = None
        network = self._backbone().trainable(self._like(), self.about["seed"]) if self._method.trains_network else None
        self._context = self._context_of(network)
        self._server = self._method.server(self._context)
        self._server.load_model(self._tensors, self._tasks)

    def _choice(self, group: str) -> Any:
        node = self.about["settings"][group]
        knobs = {name: value for name, value in node.items() if name != "_target_"}
        return typed_instance(target_class(group, node["_target_"]), knobs, group)

    def _backbone(self) -> Backbone:
        backbone: Backbone = self._choice("backbone")
        if getattr(backbone, "compile", False):
            require_compiler(self._device)
        return backbone

    def _context_of(self, network: Any) -> Context:
        about = self.about
        wire = WireFormat(**{**about["wire"], "dtype": WIRE_DTYPES[about["wire"]["dtype"]]})
        dtype, device = getattr(torch, about["dtype"]), self._device
        known = about["clients"], about["recurring"]
        return Context(about["dimension"], about["seed"], dtype, device, wire, network, *known)

    def _like(self) -> Dataset:
        """A data set of one black image as large as the first that was learnt from, or of an empty text."""
        if self.about["takes"] == "texts":
            return Dataset(self.about["data"], *[samples_of([""], texts=True)] * 2)
        width, height = self.about["image"] or (1, 1)
        black = image_split([0], ArrayImages(np.zeros((1, height, width, 3), dtype=np.uint8)))
        return Dataset(self.about["data"], black, black)

    def predict(self, inputs: Any, tasks: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """(n,) int64: the label of each sample, as the data set numbers its classes.

        Args:
            inputs: n images (an array (n, h, w) or (n, h, w, 3) in uint8, PIL images, paths of image files), n texts,
                or the backbone's features (n, d).
            tasks: (n,) the task of each sample, from 0; only for a model that is tested in batches of one task.

        Raises:
            UserError: they are neither, or not of the form that the model was trained on.
        """
        return self.labels[self._answered(inputs, tasks)[0]]

    def scores(self, inputs: Any, tasks: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """(n, C) the score of each class, in the order of `labels`; see `predict`.

        The largest score is the answer, except for a method that first names the sample's task.
        """
        return self._answered(inputs, tasks)[1]

    def answers(self, inputs: Any, tasks: Sequence[int] | np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """`predict`, and (n,) the score of each answer."""
        columns, scores = self._answered(inputs, tasks)
        return self.labels[columns], np.take_along_axis(scores, columns[:, None], axis=1)[:, 0]

    def features(self, images: Any) -> np.ndarray:
        """(n, d) float32: what the model's frozen backbone makes of images.

        Raises:
            UserError: it takes no images, or trains its network, so that features are a part of it.
        """
        if self._method.trains_network:
            raise UserError(f"method={self.about['method']} has no frozen backbone", "predict, or scores")
        return self._features(self._samples(images, "images")).numpy()

    def _answered(self, inputs: Any, tasks: Sequence[int] | np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """(n,) the columns of the answers, and (n, C) all scores."""
        tensor = self._tensor(inputs)
        columns, scores = np.empty(len(tensor), dtype=np.int64), np.empty((len(tensor), len(self.labels)))
        for rows, prediction in self._predictions(tensor, tasks):
            columns[rows] = chosen(prediction, self._classes).cpu().numpy()
            scores[rows] = prediction.scores.cpu().numpy()
        return columns, scores

    def _predictions(
        self, tensor: torch.Tensor, tasks: Sequence[int] | np.ndarray | None
    ) -> Iterator[tuple[np.ndarray, Prediction]]:
        """Yield the predictions of some rows after the others, in batches as the run's tests came."""
        pure = self._server.pure_batches
        groups: tuple[np.ndarray, ...] = (np.arange(len(tensor)),)
        if pure is not None:
            given = np.full(0, -1) if tasks is None else np.asarray(tasks)
            if given.shape != (len(tensor),):
                raise UserError(
                    f"this model of method={self.about['method']} is asked in batches of {pure} samples of one task",
                    f"tasks, an array ({len(tensor)},) with each sample's task, from 0",
                )
            if wrong := set(given.tolist()) - set(range(len(self._tasks))):
                raise UserError(f"tasks has {min(wrong)}, no task of this model", f"0 to {len(self._tasks) - 1}")
            # Those without samples count, too: the batches of a task depend on its number.
            groups = tuple(np.flatnonzero(given == task) for task in range(len(self._tasks)))
        for rows in test_batches(groups, pure, self._context.seed):
            batch = TestBatch(partial(on_device, tensor, rows, self._context), pure is not None)
            yield rows, self._server.classify(batch)

    def _tensor(self, inputs: Any) -> torch.Tensor:
        """Samples as the server takes them: images, or features."""
        samples = self._samples(inputs)
        if isinstance(samples.inputs, np.ndarray) and samples.inputs.dtype != object:
            wide = samples.inputs.shape[1]
            if self._method.trains_network:
                raise UserError("inputs are features, and the model takes images", "uint8 images (n, h, w, 3)")
            if wide != self.about["dimension"]:
                raise UserError(f"inputs have {wide} features", f"the model's {self.about['dimension']}")
            features = torch.from_numpy(samples.inputs)
            if len(bad := rows_not_finite(features)):
                raise UserError(f"inputs hold NaN or infinity in row {int(bad[0])}", "every feature is a finite number")
            return features
        if self._method.trains_network:
            assert self._context.network is not None
            return load_pixels(samples, self._context.network.size, what="inputs")
        return self._features(samples)

    def _samples(self, inputs: Any, wanted: str = "") -> Split:
        samples = samples_of(inputs, texts=(takes := self.about["takes"]) == "texts")
        if (kind := kind_of_inputs(samples.inputs)) not in (takes, "features"):
            raise UserError(f"inputs are {kind}, and the model was made on {takes}", f"{takes}, or features (n, d)")
        if wanted == "images" and kind == "features":
            raise UserError("inputs are features already", "images")
        return samples

    def _features(self, samples: Split) -> torch.Tensor:
        """(n, d) of images."""
        if self._extractor is None:
            self._extractor = self._opened()
        parts = list(self._extractor.batches(samples))
        features = torch.cat(parts) if parts else torch.empty(0, self.about["dimension"])
        if features.shape[1] != self.about["dimension"]:
            raise UserError(
                f"inputs are images of which backbone={self.about['backbone']} makes {features.shape[1]} features",
                f"images that give {self.about['dimension']}, such as of {self.about['image']} pixels",
            )
        return features

    def _opened(self) -> Extractor:
        """The frozen backbone, adapted where the run adapted it. Raises a UserError where it has other weights."""
        stage, backbone, seed = self._choice("adapt"), self._backbone(), self.about["seed"]
        if isinstance(stage, NoOption):
            found = backbone.open(self._like(), self._device, seed)
        else:
            network = backbone.trainable(self._like(), seed)
            trained = {n.removeprefix(ADAPTED): v for n, v in self._tensors.items() if n.startswith(ADAPTED)}
            body = stage.body(self._context_of(network), self._tasks[0], trained)
            found = adapted_extractor(backbone, body, network, self._device)
        # Of weights that the model brings itself, counters of batches that no prediction uses may differ.
        brings = any(name.startswith(ADAPTED) for name in self._tensors)
        if not brings and found.identity.get("weights") != self.about["weights"]:
            raise UserError(
                f"backbone={self.about['backbone']} has other weights than the model was made with"
                f" ({found.identity['weights'][:8]}, not {self.about['weights'][:8]})",
                "the weights that the run had",
            )
        return found


def tested_samples(
    folder: Path, record: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, labels, tasks and indices of the n test samples that a run was tested on, by ascending index.

    Raises:
        UserError: the data are not there, or others than the run had.
    """
    node = {name: value for name, value in config["data"].items() if name not in HELD_OUT}
    dataset = typed_instance(target_class("data", node.pop("_target_", None)), node, "data").load()
    if _fingerprint(dataset, record) != record["data_fingerprint"]:
        raise UserError(f"data={record['data']} is not what run {record['run_id']} was made on", "the same files")
    replaced = record["validation"] is not None and record["validation"]["replaces_test"]
    side, tested = ("validation", dataset.train) if replaced else ("test", dataset.test)
    with np.load(folder / "partition.npz") as partition:
        tests = [partition[f"{side}_t{task}"] for task in range(record["tasks"])]
    indices = np.concatenate(tests)
    tasks = np.repeat(np.arange(len(tests)), [len(own) for own in tests])
    order = np.argsort(indices, kind="stable")
    indices, tasks = indices[order], tasks[order]
    chosen_rows = rows_of(tested, indices)
    inputs = chosen_rows.inputs
    return inputs.pixels if isinstance(inputs, ArrayImages) else inputs, chosen_rows.labels, tasks, indices


def _fingerprint(dataset: Dataset, record: Mapping[str, Any]) -> str:
    """Return it as the run has it, with the hashes that the nodes told of samples that stay at their sites."""
    if not dataset.elsewhere:
        return dataset.fingerprint
    hashes = {client: node["data"] for node in record["transport"]["nodes"] for client in node["clients"]}
    return json_hash([dataset.fingerprint, json_hash([hashes[client] for client in sorted(hashes)])])
