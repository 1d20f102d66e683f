"""The `baton` command. It imports a service only inside the function that runs it."""

import sys
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from baton_cli import keys, model
from baton_cli.errors import UserError
from baton_cli.hub_models import local_folder
from baton_cli.requirements import check_versions
from baton_cli.up import up

if TYPE_CHECKING:
    from baton_decode.settings import DecodeSettings
    from baton_gateway.settings import GatewaySettings
    from baton_prefill.settings import PrefillSettings

_Served = TypeVar("_Served", "GatewaySettings", "PrefillSettings", "DecodeSettings")

# The settings class of a service parses its flags and prints its --help, so typer passes all arguments on.
_PASS_ALL = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command(context_settings={"auto_envvar_prefix": "BATON"})(up)
app.add_typer(keys.app, name="keys")
app.add_typer(model.app, name="model")
bench = typer.Typer(help="Measure servers.", no_args_is_help=True, add_completion=False)
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def baton(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Serve large language models with prefill and decode on separate pods."""
    if version:
        typer.echo(installed_version("baton"))
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(context_settings=_PASS_ALL, add_help_option=False)
def gateway(context: typer.Context) -> None:
    """Run a gateway: the OpenAI API in front of the pods."""
    check_versions("gateway")
    from baton_cli.service_settings import settings_from
    from baton_gateway.settings import GatewaySettings

    settings = _with_folder(settings_from(context.args, GatewaySettings, "baton gateway"), weights=False)
    from baton_gateway.main import main

    main(settings)


@app.command(context_settings=_PASS_ALL, add_help_option=False)
def prefill(context: typer.Context) -> None:
    """Run a prefill pod."""
    check_versions("worker", "gpu")
    from baton_cli.service_settings import settings_from
    from baton_prefill.settings import PrefillSettings

    settings = _with_folder(settings_from(context.args, PrefillSettings, "baton prefill"), weights=True)
    from baton_prefill.main import main

    main(settings)


@app.command(context_settings=_PASS_ALL, add_help_option=False)
def decode(context: typer.Context) -> None:
    """Run a decode pod."""
    check_versions("worker", "gpu")
    from baton_cli.service_settings import settings_from
    from baton_decode.settings import DecodeSettings

    settings = _with_folder(settings_from(context.args, DecodeSettings, "baton decode"), weights=True)
    from baton_decode.main import main

    main(settings)


@app.command(context_settings=_PASS_ALL, add_help_option=False)
def controller(context: typer.Context) -> None:
    """Run the controller of a release: canaries and scaling."""
    check_versions("controller")
    from baton_cli.service_settings import settings_from
    from baton_controller.settings import ControllerSettings

    settings = settings_from(context.args, ControllerSettings, "baton controller")
    from baton_controller.main import main

    main(settings)


@bench.command(context_settings=_PASS_ALL, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Send load to one or more OpenAI endpoints and compare latency, throughput and goodput."""
    check_versions("bench")
    from baton_bench.errors import BenchError
    from baton_bench.settings import BenchSettings
    from baton_cli.service_settings import settings_from

    settings = settings_from(context.args, BenchSettings, "baton bench serve")
    from baton_bench.main import main

    try:
        raise typer.Exit(main(settings))
    except BenchError as error:
        raise UserError(str(error)) from None


def _with_folder(settings: _Served, *, weights: bool) -> _Served:
    """Return settings in which the id of a model on a hub is replaced with the folder into which it was downloaded."""
    folder, name = (None, None) if settings.model is None else local_folder(str(settings.model), weights=weights)
    if name is None:
        return settings
    return settings.model_copy(update={"model": folder, "served_model_name": settings.served_model_name or name})


def main() -> None:
    """Run the command line. A UserError prints its text and sets the exit code."""
    try:
        app()
    except UserError as error:
        print(f"baton: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
