"""`baton keys`: make, list, rotate and revoke API keys."""

import math
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton_cli.errors import UserError
from baton_gateway.tenancy.keys import MOST_DAYS, Key, make_key, utc_now

if TYPE_CHECKING:
    from baton_gateway.tenancy.key_book import KeyBook

app = typer.Typer(help="Make, list, rotate and revoke API keys.", no_args_is_help=True, add_completion=False)

File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        envvar="BATON_TENANTS_FILE",
        help="The gateways' file of tenants. It also holds the keys, unless they are in Redis.",
    ),
]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        envvar="BATON_REDIS_URL",
        help="URL of the Redis that holds the keys. --file still lists the tenants; without it, only 'default' exists.",
    ),
]


@app.command()
def create(
    tenant: Annotated[str, typer.Argument(help="Tenant that the key belongs to.")],
    days: Annotated[
        float | None, typer.Option(min=0, max=MOST_DAYS, help="How many days it is valid. Default: for ever.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that the key may use; may be repeated. Default: all.")
    ] = None,
    file: File = None,
    redis_url: RedisUrl = None,
) -> None:
    """Make a key and print it. It cannot be printed again, because only its hash is stored."""
    text, key = make_key(tenant, _in_days(days), model, days)
    _put(_book(file, redis_url), key)
    typer.echo(text)


@app.command("list")
def list_keys(file: File = None, redis_url: RedisUrl = None) -> None:
    """Print the keys by their public parts, with tenant, expiry and models."""
    for key in sorted(_book(file, redis_url).all(), key=lambda key: (key.tenant, key.id)):
        state = "expired" if key.expired(utc_now()) else "valid"
        expiry = key.expires.isoformat() if key.expires else "never expires"
        typer.echo(f"{key.id}  {key.tenant}  {state}  {expiry}  {','.join(key.models) or 'all models'}")


@app.command()
def rotate(
    id: Annotated[str, typer.Argument(help="The public part of the key, as `baton keys list` prints it.")],
    overlap_hours: Annotated[
        float, typer.Option(min=0, max=24 * MOST_DAYS, help="How many hours the old key stays valid.")
    ] = 24,
    days: Annotated[
        float | None,
        typer.Option(min=0, max=MOST_DAYS, help="How many days the new key is valid. Default: as many as the old one."),
    ] = None,
    file: File = None,
    redis_url: RedisUrl = None,
) -> None:
    """Replace a key by a new one and print the new one. The old key stays valid for a while."""
    book = _book(file, redis_url)
    old = next((key for key in book.all() if key.id == id), None)
    if old is None:
        raise UserError(f"there is no key {id!r}")
    if days is None and old.days is None and old.expires is not None:
        raise UserError(f"the original validity of key {id!r} is unknown: give --days")
    days = old.days if days is None else days
    end = _in_days(overlap_hours / 24)
    assert end is not None
    text, key = make_key(old.tenant, _in_days(days), old.models, days)
    _put(book, key)
    ended = Key(old.id, old.hash, old.tenant, min(end, old.expires or end), old.models, old.days)
    _put(book, ended)
    typer.echo(text)
    typer.echo(f"new key {key.id}: {_validity(key)}; old key {old.id}: {_validity(ended)}", err=True)


@app.command()
def revoke(
    id: Annotated[str, typer.Argument(help="The public part of the key, as `baton keys list` prints it.")],
    file: File = None,
    redis_url: RedisUrl = None,
) -> None:
    """Delete a key. Gateways refuse it within a second."""
    if not _book(file, redis_url).remove(id):
        raise UserError(f"there is no key {id!r}")


def _book(file: Path | None, redis_url: str | None) -> "KeyBook":
    # Imported only here, because the redis package may be missing on workers.
    from redis import Redis

    from baton_gateway.tenancy.key_book import FileKeys, RedisKeys
    from baton_gateway.tenancy.tenants import TenantsError

    try:
        if redis_url is not None:
            return RedisKeys(Redis.from_url(redis_url), file)
        if file is not None:
            return FileKeys(file)
    except TenantsError as error:
        raise UserError(str(error)) from None
    raise UserError("give --file or --redis-url")


def _put(book: "KeyBook", key: Key) -> None:
    from baton_gateway.tenancy.tenants import TenantsError

    try:
        book.put(key)
    except TenantsError as error:
        raise UserError(str(error)) from None


def _validity(key: Key) -> str:
    return f"valid until {key.expires.isoformat()}" if key.expires else "never expires"


def _in_days(days: float | None) -> datetime | None:
    if days is None:
        return None
    if math.isnan(days):
        raise UserError("a time must be a number")
    return utc_now().replace(microsecond=0) + timedelta(days=days)
