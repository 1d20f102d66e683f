"""`baton up`: runs prefill, decode and gateway as processes on this machine."""

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from baton_cli.child import Child
from baton_cli.display import display_for
from baton_cli.errors import BadSetting, UserError
from baton_cli.hub_models import local_folder
from baton_cli.layout import Layout, greeting
from baton_cli.log_line import LogLevel
from baton_cli.ports import LOOPBACK, Address, check_usable, free_loopback_ports
from baton_cli.supervisor import Supervisor
from baton_demo import MODEL_DIR
from baton_engine.config import GPU_MEMORY_UTILIZATION

_DEMO_NAME = "baton-demo"


def up(
    model: Annotated[
        str | None,
        typer.Option(help="Model folder, or owner/name or owner/name@revision on a hub. Default: the demo model."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model for clients. Default: the folder's name, or owner/name.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address the gateway listens on.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port the gateway listens on.")] = 8000,
    admin_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Local port of metrics and probes. Default: any free port.")
    ] = None,
    prefill: Annotated[int | None, typer.Option(min=1, help="Number of prefill workers. Default: 1.")] = None,
    decode: Annotated[int, typer.Option(min=1, help="Number of decode workers.")] = 1,
    aggregated: Annotated[
        bool, typer.Option("--aggregated", help="Run no prefill workers; decode workers prefill too.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="Data type the workers compute in.")] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Quantize the weights while they are loaded: fp8, int8 or int4.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="Data type of the KV: auto, or fp8 for twice the tokens.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV blocks of each worker.")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Fraction of the GPU's memory that each worker may use.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of a prompt and its answer together.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Most tokens in one engine step.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most sequences in one engine step.")] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse the KV of shared prefixes."),
    ] = None,
    deterministic: Annotated[
        bool | None, typer.Option("--deterministic", help="Make tokens independent of other requests; slower.")
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="Processes among which each worker divides the model, one for each GPU.")
    ] = None,
    expert_parallel: Annotated[
        bool | None, typer.Option("--expert-parallel", help="Give each of these processes whole experts of the model.")
    ] = None,
    pipeline_parallel: Annotated[
        int | None, typer.Option(min=1, help="Stages that have some of the layers each, with as many processes each.")
    ] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="A key that clients must send; may be repeated.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file with the chat template. Default: the model's own.")
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(help="Format of the model's tool calls, such as hermes or harmony, or none. Default: auto."),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(help="Format of the model's thoughts: think, harmony, mistral, gemma or none. Default: auto."),
    ] = None,
    use_generation_config: Annotated[
        bool | None,
        typer.Option(
            "--use-generation-config/--no-use-generation-config",
            help="Take sampling defaults from the model's generation_config.json.",
        ),
    ] = None,
    log_level: Annotated[LogLevel | None, typer.Option(help="Log level of all processes. Default: info.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for one log file per process.")] = None,
) -> None:
    """Start a local Baton: prefill, decode and gateway, until Ctrl-C."""
    if aggregated and prefill is not None:
        raise BadSetting("--aggregated runs no prefill worker: leave --prefill out")
    workers = decode if aggregated else decode + (prefill or 1)
    level = _flags(log_level=log_level)
    public, admin = Address(host, port), Address(LOOPBACK, admin_port or free_loopback_ports(1)[0])
    keys = _api_keys(api_key)
    # Checked before the model is downloaded, which may take long.
    check_usable(public)
    check_usable(admin)
    folder, name = _model(model, served_model_name)
    layout = Layout(
        model=str(folder),
        served_model_name=name,
        public=public,
        admin=admin,
        prefill=0 if aggregated else prefill or 1,
        decode=decode,
        worker_flags=level
        + _flags(
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block_size,
            num_blocks=num_blocks,
            gpu_memory_utilization=gpu_memory_utilization or _gpu_share(workers),
            gpu_pair_memory=_gpu_pair_memory(),
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=enable_prefix_caching,
            deterministic=deterministic,
            tensor_parallel=tensor_parallel,
            expert_parallel=expert_parallel,
            pipeline_parallel=pipeline_parallel,
            engines_sharing_cpu=None if "BATON_ENGINES_SHARING_CPU" in os.environ else workers,
        ),
        gateway_flags=level
        + _flags(
            chat_template=chat_template,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            use_generation_config=use_generation_config,
        ),
        api_keys=keys,
    )
    raise typer.Exit(asyncio.run(_supervise(layout, log_level or LogLevel.INFO, log_dir)))


def _model(model: str | None, name: str | None) -> tuple[Path, str]:
    if model is None:
        return MODEL_DIR, name or _DEMO_NAME
    folder, hub_name = local_folder(model, weights=True)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is no model folder: it has no config.json")
    return folder, name or hub_name or folder.resolve().name


def _gpu_share(workers: int) -> float | None:
    """Return each worker's fraction of the shared GPU's memory; None leaves the worker's own default or setting."""
    if workers == 1 or "BATON_GPU_MEMORY_UTILIZATION" in os.environ:
        return None
    return int(GPU_MEMORY_UTILIZATION / workers * 100) / 100


def _gpu_pair_memory() -> float | None:
    """Return the memory that each worker reserves for pairs with other GPUs: 0, because all share one GPU. None leaves
    it to the environment variable."""
    return None if "BATON_GPU_PAIR_MEMORY" in os.environ else 0


def _api_keys(given: list[str] | None) -> list[str]:
    keys = given or os.environ.get("BATON_API_KEYS", "").split(",")
    if any("," in key for key in keys):
        raise BadSetting("--api-key: a key cannot hold a comma")
    return [key.strip() for key in keys if key.strip()]


def _flags(**given: object) -> list[str]:
    """Return kebab-case flags for the values that are not None."""
    flags: list[str] = []
    for name, value in given.items():
        kebab = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{kebab}" if value else f"--no-{kebab}")
        elif value is not None:
            flags += [f"--{kebab}", str(value)]
    return flags


async def _supervise(layout: Layout, level: LogLevel, log_dir: Path | None) -> int:
    ports = free_loopback_ports(2 * layout.workers)
    metrics_ports = ports[layout.workers :]
    stages = layout.in_shutdown_order(ports[: layout.workers], metrics_ports)
    names = [spec.name for stage in stages for spec in stage]
    with contextlib.ExitStack() as stack:
        display = stack.enter_context(display_for(names, level))
        children = [[Child(spec, display, _log(stack, log_dir, spec.name)) for spec in stage] for stage in stages]
        return await Supervisor(children, display, greeting(layout, metrics_ports)).run()


def _log(stack: contextlib.ExitStack, folder: Path | None, name: str) -> BinaryIO | None:
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return stack.enter_context((folder / f"{name}.log").open("ab"))
