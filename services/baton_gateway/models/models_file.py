"""The file that lists the models of a gateway and the pods that serve each model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ..reasoning.formats import ReasoningFormat
from ..tools.tool_formats import ToolFormat

SpecialTokensPolicy = Literal["text", "tokens", "reject"]

_Name = Annotated[str, msgspec.Meta(min_length=1)]
_PublishedText = Annotated[str, msgspec.Meta(max_length=65_536)]


class PoolSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Pods that serve some of a model's requests: a list of host:port, or in Kubernetes the pods that a selector finds.

    selector: matches the labels of EndpointSlices, which are those of their Services. tenants: the tenants that the
    pods serve; none = all. max_prompt_tokens: the longest prompt that the pods are meant for; 0 = no limit.
    """

    name: _Name = "default"
    decode: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    selector: str = ""
    tenants: tuple[str, ...] = ()
    max_prompt_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0


class PublishedMessage(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    role: _Name
    content: _PublishedText


class PublishedPrefix(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A prompt prefix that is not secret: the first messages of chats, or the first text of completions."""

    text: _PublishedText = ""
    messages: Annotated[tuple[PublishedMessage, ...], msgspec.Meta(max_length=64)] = ()

    def __post_init__(self) -> None:
        if bool(self.text) == bool(self.messages):
            raise ValueError("give either `text` or `messages`")


class ModelSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A model and its pools. A request goes to the first pool that is meant for it.

    name: the name that clients use; none = the folder's name. tool_call_parser, reasoning_parser: as in the gateway's
    settings of these names. special_tokens_in_content: overrides the gateway's setting of that name; none = the setting
    holds. published_prefixes: prompt prefixes whose cached KV blocks all tenants share.
    """

    name: str = ""
    folder: Path
    chat_template: Path | None = None
    tool_call_parser: ToolFormat = "auto"
    reasoning_parser: ReasoningFormat = "auto"
    special_tokens_in_content: SpecialTokensPolicy | None = None
    use_generation_config: bool = True
    published_prefixes: Annotated[tuple[PublishedPrefix, ...], msgspec.Meta(max_length=64)] = ()
    pools: Annotated[tuple[PoolSpec, ...], msgspec.Meta(min_length=1)]


class ModelsFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The content of the file, in YAML or JSON. Paths are relative to the file."""

    models: Annotated[tuple[ModelSpec, ...], msgspec.Meta(min_length=1)]


class ModelsFileError(ValueError):
    """The file is invalid. The message names the place in the file and the reason."""


def read_models(path: Path) -> tuple[ModelSpec, ...]:
    """Read and check the models of a file. Raises ModelsFileError."""
    try:
        content = msgspec.yaml.decode(path.read_bytes(), type=ModelsFile, dec_hook=_path)
    except OSError as error:
        raise ModelsFileError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ModelsFileError(f"{path}: {error}") from None
    models = tuple(_resolved(model, path.resolve().parent) for model in content.models)
    if duplicate := _duplicate([model.name for model in models]):
        raise ModelsFileError(f"{path}: there are two models with the name {duplicate!r}")
    for model in models:
        where = f"{path}: model {model.name}"
        if not model.folder.is_dir():
            raise ModelsFileError(f"{where}: {model.folder} is not a folder")
        if duplicate := _duplicate([pool.name for pool in model.pools]):
            raise ModelsFileError(f"{where}: there are two pools with the name {duplicate!r}")
        for pool in model.pools:
            if bool(pool.decode) == bool(pool.selector) or (pool.prefill and pool.selector):
                raise ModelsFileError(f"{where}, pool {pool.name}: give either `decode` pods or a `selector`")
            try:
                check_addresses((*pool.decode, *pool.prefill))
            except ValueError as error:
                raise ModelsFileError(f"{where}, pool {pool.name}: {error}") from None
    return models


def check_addresses(addresses: Sequence[str]) -> None:
    """Raises ValueError when an address is not host:port."""
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"{address!r} is not host:port")


def _path(kind: type, value: object) -> object:
    """Convert a text to a path. NotImplementedError tells msgspec that a value of another type cannot be converted."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError


def _resolved(model: ModelSpec, base: Path) -> ModelSpec:
    folder = base / model.folder
    template = None if model.chat_template is None else base / model.chat_template
    return msgspec.structs.replace(
        model, name=model.name or folder.resolve().name, folder=folder, chat_template=template
    )


def _duplicate(names: Sequence[str]) -> str | None:
    return next((name for name in names if names.count(name) > 1), None)
