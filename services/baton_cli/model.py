"""`baton model`: facts about a model folder, downloads from a hub, and quantized copies."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from baton_cli.errors import BadSetting
from baton_cli.hub_models import pull_model
from baton_cli.model_kv_scales import kv_scales
from baton_cli.model_quantize import quantize
from baton_cli.model_show import show
from baton_demo import MODEL_DIR

# The suffixes of quantities in Kubernetes.
_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}


class _ShowByDefault(TyperGroup):
    """Interprets `baton model MODEL` as `baton model show MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0].startswith("-"))
        return super().parse_args(ctx, args if named or not args else ["show", *args])


app = typer.Typer(
    cls=_ShowByDefault,
    help="Facts about a model, a download, or a quantized copy. Without arguments: facts about the demo model.",
    add_completion=False,
)
app.command()(show)
app.command(name="kv-scales")(kv_scales)
app.command()(quantize)


@app.callback(invoke_without_command=True)
def _model(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        show(str(MODEL_DIR))


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="owner/name or owner/name@revision on the hub.")],
    cache: Annotated[Path | None, typer.Option(help="Folder of the cache. Default: HF_HUB_CACHE.")] = None,
    weights: Annotated[
        bool, typer.Option("--weights/--no-weights", help="Also the weights, which gateways do not need.")
    ] = True,
    volume_size: Annotated[
        str | None, typer.Option(help="What the cache may hold, such as 20Gi. Default: what the disk has left.")
    ] = None,
) -> None:
    """Download what Baton reads of a model from a hub, and print its folder.

    An interrupted download is resumed. HF_TOKEN or the file HF_TOKEN_PATH has the token for models that are not public,
    HF_ENDPOINT is the URL of a mirror, and HF_HUB_OFFLINE=1 uses only the cache.
    """
    size = None if volume_size is None else _bytes(volume_size)
    typer.echo(pull_model(model, weights=weights, cache=cache, volume_size=size))


def _bytes(quantity: str) -> int:
    """Return the bytes of a quantity as Kubernetes writes it."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([A-Za-z]{0,2})", quantity)
    if found is None or found[2] not in _UNITS:
        raise BadSetting(f"--volume-size: {quantity!r} is no size such as 20Gi")
    return int(float(found[1]) * _UNITS[found[2]])
