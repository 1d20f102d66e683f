"""Reads the headers of a model's weight files, in a folder or on a hub."""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from baton_engine.checkpoint import INDEX, Checkpoint, parse_header, parse_index
from baton_engine.config import ConfigError


class KnownWeights(NamedTuple):
    """checkpoint: None = there are no weights, or nothing is known of them; `unknown` is then the reason. refused: why
    the engine would not load them."""

    checkpoint: Checkpoint | None
    unknown: str | None = None
    refused: str | None = None


def weights_in(folder: Path) -> KnownWeights:
    """Read the headers of a model folder's files. Raises ConfigError for damaged files."""
    if any(folder.glob("*.safetensors")):
        return KnownWeights(Checkpoint.read(folder))
    pickles = any(folder.glob("*.bin"))
    return KnownWeights(None, refused="weights in pickle files are not read" if pickles else None)


def weights_on_hub(repo: str, folder: Path) -> KnownWeights:
    """Read the headers of a model's files on a hub, or in the cache if it has them. folder: the commit's cache
    folder."""
    # Importing the client of the hub takes a third of a second.
    from baton_hub.beginnings import read_beginnings
    from baton_hub.errors import HubError, HubUnreachable
    from baton_hub.model_id import HubModel

    with suppress(ConfigError):
        return KnownWeights(Checkpoint.read(folder))
    model, at = HubModel(repo, folder.name), Path(repo)
    try:
        index, headers = read_beginnings(model, lambda file, read: parse_header(at / file.name, file.size, read))
        promised = None if index is None else parse_index(at / INDEX, index)
        return KnownWeights(Checkpoint.of_headers(at, headers, promised))
    except (ConfigError, HubError) as error:
        return KnownWeights(None, str(error), None if isinstance(error, HubUnreachable) else str(error))
