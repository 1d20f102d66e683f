"""Reads a service's settings from its command line and environment, with readable errors."""

from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsError

from baton_cli.errors import BadSetting

Settings = TypeVar("Settings", bound=BaseSettings)


def settings_from(args: Sequence[str], kind: type[Settings], program: str) -> Settings:
    """Read `kind` from flags (`--block-size 16`), then from the environment (`BATON_BLOCK_SIZE`).

    Raises BadSetting. `--help` prints the flags, which are the fields of `kind`, and exits.
    """
    source = CliSettingsSource[Settings](
        kind,
        cli_prog_name=program,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_show_env_vars=True,
        cli_exit_on_error=False,
    )
    try:
        return CliApp.run(kind, cli_args=list(args), cli_settings_source=source)
    except ValidationError as error:
        prefix = kind.model_config.get("env_prefix", "")
        # Leave out the invalid value, because it may be an API key.
        lines = [_explain(found, prefix) for found in error.errors(include_input=False)]
        raise BadSetting("\n".join(lines)) from None
    except SettingsError as error:
        raise BadSetting(str(error).removeprefix("error parsing CLI: ")) from None


def _explain(found: ErrorDetails, env_prefix: str) -> str:
    message = found["msg"].removeprefix("Value error, ")
    if not found["loc"]:  # the messages of checks over several fields already name the fields
        return message
    name = str(found["loc"][0])
    return f"--{name.replace('_', '-')} (or {env_prefix}{name.upper()}): {message}"
