"""`baton model show`: what a model is, and which GPUs it fits on."""

import re
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from baton_cli.errors import BadSetting, UserError
from baton_cli.hub_models import local_folder

if TYPE_CHECKING:
    from baton_cli.model_facts import ModelFacts, Served
    from baton_engine.memory_estimate import Card

# The memory of each GPU in GiB as CUDA reports it. Vendors' figures are larger, and the driver keeps a part.
GPUS = {
    "h200": 139.8,
    "h100-80": 79.1,
    "a100-80": 79.1,
    "a100-40": 39.4,
    "l40s": 44.4,
    "l4": 22.0,
    "rtx4090": 23.6,
}


def show(
    model: Annotated[str, typer.Argument(help="Model folder, or owner/name or owner/name@revision on the hub.")],
    gpu: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(GPUS)}, or a memory as 24GiB; may be repeated. Default: all of these."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Data type of the weights, as --dtype of a worker on a GPU.")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Data type of the KV: auto or fp8, as --kv-cache-dtype of a worker.")
    ] = "auto",
    quantization: Annotated[
        str, typer.Option(help="auto (as they are stored), fp8, int8 or int4, as --quantization of a worker.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with sizes in bytes and tokens.")] = False,
) -> None:
    """Print what a model is and which GPUs it fits on. It reads no weights and needs no GPU.

    For a model on the hub, everything except the weights is downloaded. Only the headers of weight files are read.
    """
    folder, repo = local_folder(model, weights=False)
    if not folder.is_dir():
        raise UserError(f"there is no folder {model}")
    try:
        from baton_cli.model_facts import model_facts
        from baton_cli.model_weights import weights_on_hub
        from baton_engine.config import ConfigError
    except ModuleNotFoundError as error:
        raise UserError(f"this needs the packages of a worker (baton[worker]): {error}") from None
    try:
        cards = [_card(name) for name in gpu or GPUS]
        weights = None if repo is None else weights_on_hub(repo, folder)
        facts = model_facts(folder, dtype, cards, kv_cache_dtype, quantization, weights)
    except (ConfigError, OSError) as error:
        raise UserError(str(error)) from None
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(facts)).decode())
        return
    typer.echo(_facts_text(facts))
    if facts.served is not None:
        typer.echo(f"\n{_gpus_text(facts.served, facts.context or 0)}")


def _card(name: str) -> "Card":
    from baton_engine.memory_estimate import Card

    if name.lower() in GPUS:
        return Card(name.lower(), int(GPUS[name.lower()] * 2**30))
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)\s*GiB", name, re.IGNORECASE)
    if match is None:
        raise BadSetting(f"--gpu {name!r} is none of {', '.join(GPUS)}, and no memory as 24GiB")
    return Card(name, int(float(match[1]) * 2**30))


def _facts_text(facts: "ModelFacts") -> str:
    rows = {"architecture": facts.architecture}
    if facts.not_served is not None:
        rows["not served"] = facts.not_served
    served, files = facts.served, facts.files
    if served is not None:
        rows["family"] = served.family
        rows["parameters"] = f"{served.parameters:,}"
        if served.active != served.parameters:
            rows["parameters"] += f", of which a token uses {served.active:,}"
    elif files is not None:
        rows["parameters"] = f"{files.elements:,} in the files"
    heads = f"{_count(facts.heads)} ({_count(facts.kv_heads or facts.heads)} for keys and values)"
    rows |= {
        "layers": _count(facts.layers),
        "hidden size": _count(facts.hidden_size),
        "heads": f"{heads} of {_count(facts.head_dim)}",
        "vocabulary": _count(facts.vocabulary),
        "context": f"{_count(facts.context)} tokens",
    }
    rows["weights"] = f"unknown: {facts.weights_unknown}" if facts.weights_unknown else "none in this folder"
    if files is not None:
        dtypes = ", ".join(files.dtypes)
        rows["weights"] = f"{_gib(files.bytes)} of {dtypes}, {files.tensors:,} tensors in {files.files:,} files"
        rows["weights"] += ", on the hub" if files.on_hub else ""
    if facts.quantization is not None:
        rows["quantized"] = facts.quantization
    if served is not None:
        rows["served as"] = f"{served.held}, {_gib(served.weights_bytes)}"
        if served.estimated:
            rows["served as"] += ", estimated from config.json, without the scales of the codes"
        rows["KV per token"] = f"{served.kv_bytes_per_token:,} bytes in {served.kv_dtype}"
        if served.windows:
            layers = ", ".join(f"{count} of {window:,} tokens" for window, count in served.windows.items())
            rows["KV of windows"] = (
                f"{served.kv_window_bytes:,} bytes of a sequence, for layers that see a window: {layers}"
            )
        if served.states:
            rows["states"] = f"{served.kv_state_bytes:,} bytes of a sequence, for {served.states} layers"
    licence = facts.licence
    declared = ", ".join(f"{name}: {value}" for name, value in licence.declared.items())
    named = f"{licence.file}: {licence.first_line}" if licence.file else "no file"
    rows["licence"] = f"{named}; README.md says {declared}" if declared else named
    rows["chat template"] = f"in {facts.chat_template}" if facts.chat_template else "none"
    width = max(map(len, rows))
    # These texts come from the model's authors, who must not control the terminal.
    shown = {label: "".join(each if each.isprintable() else "?" for each in fact) for label, fact in rows.items()}
    return "\n".join(f"{label:{width}}  {fact}" for label, fact in shown.items())


def _gpus_text(served: "Served", context: int) -> str:
    lines = [["GPU", "weights", "KV cache", "tokens of KV", f"sequences of {context:,}", "of 4,096", "longest"]]
    for name, fit in served.gpus.items():
        if not fit.weights_fit:
            lines.append([name, "do not fit", "", "", "", "", ""])
            continue
        counts = (fit.kv_tokens, fit.full, fit.brief, fit.longest)
        lines.append([name, "fit", _gib(fit.kv_bytes), *(f"{count:,}" for count in counts)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    problems = [f"{name}: {fit.problem}" for name, fit in served.gpus.items() if fit.problem]
    note = "The memory of the largest steps, which a worker measures when it starts, is estimated."
    return "\n".join([*table, "", note, *problems])


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"
