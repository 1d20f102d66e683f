"""`baton model kv-scales`: measures the scales of KV in FP8 once, for pods that would measure different ones."""

from pathlib import Path
from typing import Annotated

import typer

from baton_cli.errors import UserError
from baton_cli.hub_models import local_folder

_TOKENS = 1024


def kv_scales(
    model: Annotated[str, typer.Argument(help="Model folder, or owner/name or owner/name@revision on the hub.")],
    to: Annotated[Path, typer.Argument(help="The safetensors file to write, for --kv-scales of a worker.")],
    dtype: Annotated[str, typer.Option(help="Data type of the weights, as --dtype of a worker.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Write the scales of a model's keys and values in FP8: those of its checkpoint, or measured ones."""
    folder, _ = local_folder(model, weights=True)
    try:
        from baton_engine.config import ConfigError, EngineConfig
        from baton_engine.engine import Engine
        from baton_engine.models.registry import load_model_config
        from baton_engine.stored_scales import save_scales
    except ModuleNotFoundError as error:
        raise UserError(f"this needs the packages of a worker (baton[worker]): {error}") from None
    try:
        # Beside the weights, only the memory for the measuring pass is needed.
        length = min(_TOKENS, load_model_config(folder).default_model_len)
        settings = EngineConfig(
            model=str(folder), dtype=dtype, device=device, kv_cache_dtype="fp8", max_model_len=length,
            max_num_batched_tokens=length, max_num_seqs=1, enforce_eager=True,
        )  # fmt: skip
        scales = Engine(settings).runner.cache.scales
        assert scales is not None
        save_scales(scales, to)
    except (ConfigError, OSError) as error:
        raise UserError(str(error)) from None
    typer.echo(f"{to}: scales of {len(scales)} layers, {scales.digest}")
