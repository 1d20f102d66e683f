"""Small models in quantized formats, written by the formats' own tool where that runs here."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def compress(
    model_folder: Path, folder: Path, groups: dict[str, dict[str, Any]], ignore: list[str]
) -> tuple[Path, Path]:
    """Write a model of a folder as compressed-tensors does, with nearest codes, and beside it one with the numbers that
    compressed-tensors says its codes stand for. Return both folders.

    groups: config_groups as in config.json. Static activations get the scale 0.05.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    config = QuantizationConfig(config_groups=groups, ignore=ignore)
    apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        low, high = _extremes(module.weight.data, scheme.weights)
        whole = None
        if hasattr(module, "weight_global_scale"):
            whole = module.weight_global_scale.data = generate_gparam(module.weight.min(), module.weight.max())
        scale, zero = calculate_qparams(low, high, scheme.weights, whole)
        module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(module.weight_scale.dtype)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data = zero.reshape(module.weight_zero_point.shape)
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.data.fill_(1.0)
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.05)
            if hasattr(module, "input_zero_point") and not scheme.input_activations.symmetric:
                module.input_zero_point.data.fill_(-9)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    plain = folder.with_name(f"{folder.name}-plain")
    shutil.copytree(model_folder, plain)
    compressor.decompress_model(model)
    tensors = load_file(plain / "model.safetensors")
    numbers = {name: tensor.float() for name, tensor in model.state_dict().items() if name in tensors}
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    return folder, plain


def _extremes(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest number of all numbers that share a scale."""
    if args.strategy == "tensor":
        return weight.min(), weight.max()
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return tiles.amin(dim=(1, 3)), tiles.amax(dim=(1, 3))
    groups = weight.unflatten(1, (-1, args.group_size if "group" in args.strategy else weight.shape[1]))
    return groups.amin(dim=2), groups.amax(dim=2)


def rewrite(
    model_folder: Path, folder: Path, quantization: dict[str, Any], change: Callable[[str, torch.Tensor], Tensors]
) -> tuple[Path, Path]:
    """Copy a model of one file in a quantized format, and beside it one with the numbers that its codes stand for.

    change: returns for each weight of a linear layer, by the module's name, its tensors in the format, and under
    "weight" in addition the numbers that they stand for. Returns both folders.
    """
    plain = folder.with_name(f"{folder.name}-plain")
    for to in (folder, plain):
        shutil.copytree(model_folder, to)
    tensors = load_file(model_folder / "model.safetensors")
    coded, numbers = {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if "_proj" not in module.rpartition(".")[2]:
            coded[name] = numbers[name] = tensor
            continue
        changed = change(module, tensor)
        numbers[name] = changed.pop("numbers").contiguous()
        coded |= {f"{module}.{field}": value.contiguous() for field, value in changed.items()}
    save_file(coded, folder / "model.safetensors", {"format": "pt"})
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder, plain
