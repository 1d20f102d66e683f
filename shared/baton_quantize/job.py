"""Quantizes a model folder into another one, layer by layer."""

import hashlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.device import choose_dtype, find_device
from baton_engine.load_plan import build_of, planned_takes
from baton_engine.loading import Progress, Weights, dtype_name
from baton_engine.quantization.device import check_fp8
from baton_engine.quantization.registry import parse_quantization, read_quantization
from baton_hub.selection import text_files

from .codes import Tensors
from .destination import Destination
from .evaluation import Comparison
from .formats import LayerJob, choose_group, find_format
from .recording import Recorder, Site
from .report import Report, Side, decode_bytes
from .settings import Settings
from .streamed_model import StreamedModel
from .text import read_texts

REPORT = "quantization_report.json"


def quantize_model(settings: Settings, progress: Progress) -> Report:
    """Write a quantized copy of a model. An interrupted run is resumed.

    progress: called with the present work, the number of sequences that have passed a layer, and the number of all such
    passes. Raises ConfigError for settings, text or a model that cannot be used.
    """
    return _Run(settings, progress).run()


class _Run:
    """Three streams of hidden states go through the layers: those of the calibration text through the quantized layers,
    and those of the evaluation text through the original layers and through the quantized ones."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self._settings, self._progress = settings, progress
        self._format = find_format(settings.format)
        self._model = _open_model(settings)
        self._layers = self._model.config.num_layers
        self._sites = self._planned_sites()
        inputs = {name: site.inputs for site in self._sites for name in site.names}
        self._group = choose_group(settings.group_size, inputs) if self._format.grouped else 0
        self._texts = read_texts(settings, self._format.calibrated, self._model.config.vocab_size)
        fields = ConfigFile.read(settings.source).fields
        self._config = {**fields, "quantization_config": self._format.config(self._group, self._ignored(inputs))}
        # The engine's own reader, so that the evaluation also shows that it can read what was written.
        self._policy = parse_quantization(self._config).policy
        self._destination = Destination(settings.destination, self._facts(), self._layers + 1)
        self._calibration = self._model.embed(self._texts.calibration)
        self._before = self._model.embed(self._texts.evaluation)
        self._after = list(self._before)
        self._done = 0

    def run(self) -> Report:
        if not self._destination.has(self._layers):
            inside = tuple(self._model.prefix(layer) for layer in range(self._layers))
            self._destination.write(self._layers, self._model.tensors(lambda name: not name.startswith(inside)))
        for layer in range(self._layers):
            self._quantize_layer(layer)
            self._advance(layer, (layer + 1) * self._passes - self._done)
        report = self._report()
        self._destination.put(REPORT, msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        source = self._settings.source
        for name in text_files(sorted(path.name for path in source.iterdir() if path.is_file())):
            if name != "config.json":
                self._destination.put(name, (source / name).read_bytes())
        self._destination.finish(self._config)
        return report

    def _quantize_layer(self, layer: int) -> None:
        """Write a layer unless that is done, and take all streams through it."""
        model, missing = self._model, not self._destination.has(layer)
        recorder, original = Recorder(), None
        self._advance(layer, 0)
        if self._before or (missing and self._calibration):
            original = model.layer(layer, model.checkpoint, recorder)
        if missing:
            sites = [site for site in self._sites if site.names[0].startswith(model.prefix(layer))]
            if original is not None and self._calibration:
                # The quantized layer will get the states before this layer, too.
                model.run(original, list(self._calibration), lambda: self._advance(layer))
                sites = recorder.sites
            self._destination.write(layer, self._quantized(layer, sites))
        recorder.recording = False
        if original is not None:
            model.run(original, self._before, lambda: self._advance(layer))
        if self._calibration or self._after:
            quantized = model.layer(layer, self._destination.checkpoint(layer), self._policy)
            model.run(quantized, self._calibration, lambda: self._advance(layer))
            model.run(quantized, self._after, lambda: self._advance(layer))

    def _quantized(self, layer: int, sites: list[Site]) -> Tensors:
        """Return the tensors of a layer in the format."""
        prefix, device = self._model.prefix(layer), self._model.device
        stored = self._model.tensors(lambda name: name.startswith(prefix))
        for name, tensor in stored.items():
            if not bool(torch.isfinite(tensor).all()):
                raise ConfigError(f"{name} has numbers that are not finite")
        tensors = {name: tensor.to(device, torch.float32) for name, tensor in stored.items()}
        coded = {f"{name}.weight" for site in sites for name in site.names}
        dtype = stored[f"{sites[0].names[0]}.weight"].dtype
        dtype = torch.float32 if dtype == torch.float64 else dtype
        with torch.inference_mode():
            self._format.quantize(LayerJob(self._model.config, prefix, tensors, sites, dtype, self._group))
        others = stored.keys() - coded
        return {name: tensor.to(stored[name].dtype) if name in others else tensor for name, tensor in tensors.items()}

    def _planned_sites(self) -> list[Site]:
        """Return the projections of all layers, after checking that all tensors are there. Nothing is recorded."""
        model, recorder = self._model, Recorder()
        weights = Weights(self._settings.source, model.dtype, torch.device("meta"))
        for take in planned_takes(build_of(model.config, 1, recorder), model.dtype, weights):
            weights.range(*take)
        return recorder.sites

    def _ignored(self, quantized: Collection[str]) -> list[str]:
        """Return the names of linear layers that are not quantized: the head, and the routers of experts."""
        inside = [name for name in self._model.checkpoint.tensors if name.startswith("model.layers.")]
        shapes = {name: self._model.checkpoint.tensors[name].shape for name in inside if name.endswith(".weight")}
        matrices = {name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2}
        return ["lm_head", *sorted(matrices.difference(quantized))]

    def _facts(self) -> dict[str, Any]:
        """Return what the shards depend on."""
        settings = self._settings
        return {
            "format": settings.format,
            "group size": self._group,
            "dtype": dtype_name(self._model.dtype),
            "calibration text": _digest(window.numpy().tobytes() for window in self._texts.calibration),
            "source": _digest(_described(settings.source)),
        }

    @property
    def _passes(self) -> int:
        """Passes of a sequence through each layer."""
        return 2 * len(self._texts.calibration) + 2 * len(self._texts.evaluation)

    def _advance(self, layer: int, passes: int = 1) -> None:
        self._done += passes
        self._progress(f"layer {layer + 1} of {self._layers}", self._done, self._layers * self._passes)

    def _report(self) -> Report:
        comparison = Comparison()
        logits = self._model.head()
        for ids, *hidden in zip(self._texts.evaluation, self._before, self._after, strict=True):
            comparison.add(ids, (hidden[0], hidden[1]), logits)
        sides = []
        for side, tensors in enumerate((self._model.checkpoint.tensors, self._destination.tensors())):
            read = decode_bytes(tensors.items(), self._model.config.tie_word_embeddings)
            measured = (comparison.perplexity(side), comparison.accuracy(side)) if comparison.tokens else (None, None)
            sides.append(Side(sum(stored.size for stored in tensors.values()), read, *measured))
        before, after = sides
        return Report(
            format=self._settings.format,
            group_size=self._group or None,
            calibration_tokens=sum(map(len, self._texts.calibration)),
            evaluated=self._texts.evaluated,
            evaluated_tokens=comparison.tokens,
            before=before,
            after=after,
            agreement=comparison.agreement if comparison.tokens else None,
            divergence=comparison.divergence if comparison.tokens else None,
            fewer_bytes=before.decode_bytes / after.decode_bytes,
        )


def _open_model(settings: Settings) -> StreamedModel:
    folder = settings.source
    quantized = read_quantization(folder).name
    if quantized != "none":
        raise ConfigError(f"the weights of {folder} are quantized already ({quantized}); name the original model")
    device = find_device(settings.device)
    if settings.format == "fp8":
        # The quantized model is computed, too.
        check_fp8(device)
    dtype = choose_dtype(settings.dtype, ConfigFile.read(folder).dtype, device)
    model = StreamedModel(folder, settings.length, dtype, device)
    positions = model.config.max_position_embeddings
    if settings.length > positions:
        raise ConfigError(
            f"--length {settings.length} is more than the {positions} positions that the model was made for"
        )
    return model


def _described(folder: Path) -> Iterator[bytes]:
    """Yield the facts that show whether the files of a model have changed."""
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        stat = path.stat()
        yield f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode()


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
