"""`baton model quantize`: a quantized copy of a model folder."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from baton_cli.errors import UserError
from baton_cli.hub_models import interruptible, local_folder
from baton_cli.quantize_progress import quantize_progress


def quantize(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Model folder, or owner/name or owner/name@revision on the hub.")
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="New folder, or that of an interrupted run, which goes on.")
    ],
    format: Annotated[str, typer.Option(help="fp8, int8, int4-awq or int4-gptq.")],
    calibrate: Annotated[
        Path | None,
        typer.Option(help='Text like that which the model will see: plain, or .jsonl with "text". INT4 needs it.'),
    ] = None,
    evaluate: Annotated[
        Path | None,
        typer.Option(help="Text for the report. Default: a part of --calibrate that calibration leaves out."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Sequences of calibration text.")] = 128,
    length: Annotated[int, typer.Option(help="Tokens of a sequence of either text.")] = 2048,
    seed: Annotated[int, typer.Option(help="Of the random choice of text.")] = 0,
    group_size: Annotated[
        int, typer.Option(help="Inputs that share a scale in INT4: 128, 64 or 32. 0 = the largest that fits.")
    ] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of activations: auto, float32, bfloat16 or float16.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Write a quantized copy of a model in the format of compressed-tensors, which Baton, vLLM and transformers read.

    Layers are in memory one at a time. The same command continues a run that was interrupted. The report says how well
    the model predicts the text before and after, and is also written to DST/quantization_report.json.
    """
    folder, _ = local_folder(source, weights=True)
    if not folder.is_dir():
        raise UserError(f"there is no folder {source}")
    try:
        from baton_engine.config import ConfigError
        from baton_quantize.job import quantize_model
        from baton_quantize.settings import Settings
    except ModuleNotFoundError as error:
        raise UserError(f"this needs the packages of a worker (baton[worker]): {error}") from None
    try:
        settings = Settings(
            source=folder, destination=destination, format=format, calibrate=calibrate, evaluate=evaluate,
            samples=samples, length=length, seed=seed, group_size=group_size, device=device, dtype=dtype,
        )  # fmt: skip
        with interruptible(), quantize_progress() as progress:
            report = quantize_model(settings, progress)
    except (ConfigError, OSError) as error:
        raise UserError(str(error)) from None
    except KeyboardInterrupt:
        raise UserError("quantizing was interrupted; the same command resumes it") from None
    typer.echo(msgspec.json.format(msgspec.json.encode(report)).decode() if as_json else report.table())
