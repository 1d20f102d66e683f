"""`baton keys`: make, list, rotate and revoke API keys."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton_cli.errors import UserError
from baton_gateway.keys import Key, make_key, utc_now

if TYPE_CHECKING:
    from baton_gateway.key_book import KeyBook

app = typer.Typer(help="Make, list, rotate and revoke API keys.", no_args_is_help=True, add_completion=False)

File = Annotated[
    Path | None, typer.Option("--file", envvar="BATON_TENANTS_FILE", help="The file of tenants that has the keys.")
]
RedisUrl = Annotated[
    str | None, typer.Option("--redis-url", envvar="BATON_REDIS_URL", help="The Redis that has the keys.")
]


@app.command()
def create(
    tenant: Annotated[str, typer.Argument(help="Whose key it is.")],
    days: Annotated[float | None, typer.Option(min=0, help="How long it is valid; left out, for ever.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="A model it may use, repeatable; left out, all.")] = None,
    file: File = None,
    redis_url: RedisUrl = None,
) -> None:
    """Make a key and print it, once: only its hash is kept."""
    text, key = make_key(tenant, _in_days(days), model)
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
    overlap_hours: Annotated[float, typer.Option(min=0, help="How long the old key stays valid.")] = 24,
    file: File = None,
    redis_url: RedisUrl = None,
) -> None:
    """Make a key in place of another, which stays valid for a while, and print it, once."""
    book = _book(file, redis_url)
    old = next((key for key in book.all() if key.id == id), None)
    if old is None:
        raise UserError(f"there is no key {id!r}")
    text, key = make_key(old.tenant, old.expires, old.models)
    _put(book, key)
    end = utc_now().replace(microsecond=0) + timedelta(hours=overlap_hours)
    _put(book, Key(old.id, old.hash, old.tenant, min(end, old.expires or end), old.models))
    typer.echo(text)


@app.command()
def revoke(
    id: Annotated[str, typer.Argument(help="The public part of the key, as `baton keys list` prints it.")],
    file: File = None,
    redis_url: RedisUrl = None,
) -> None:
    """Forget a key; gateways refuse it within a second."""
    if not _book(file, redis_url).remove(id):
        raise UserError(f"there is no key {id!r}")


def _book(file: Path | None, redis_url: str | None) -> "KeyBook":
    # Only here, because where workers run there may be no redis.
    from redis import Redis

    from baton_gateway.key_book import FileKeys, RedisKeys
    from baton_gateway.tenants import TenantsError

    if (file is None) == (redis_url is None):
        raise UserError("give either --file or --redis-url")
    if redis_url is not None:
        return RedisKeys(Redis.from_url(redis_url))
    assert file is not None
    try:
        return FileKeys(file)
    except TenantsError as error:
        raise UserError(str(error)) from None


def _put(book: "KeyBook", key: Key) -> None:
    from baton_gateway.tenants import TenantsError

    try:
        book.put(key)
    except TenantsError as error:
        raise UserError(str(error)) from None


def _in_days(days: float | None) -> datetime | None:
    return None if days is None else utc_now().replace(microsecond=0) + timedelta(days=days)
