"""The layers that the cache has for a model with compressed attention.

Each layer of the model has its last tokens' keys in one layer of the cache, and the states of its compressors in
another one. Entries do not fill a layer of the cache, so consecutive layers of the model with the same windows share
one. The layers of the cache with keys and states have windows, so the memory of long sequences has entries alone.
"""

from typing import Any, NamedTuple

from baton_engine.attention_spec import AttentionSpec
from baton_engine.compressed_spec import CompressedSpec, Entries
from baton_engine.stage import Stage
from baton_kernels.reference.compression import window_rows

# Of a layer with states: it reads the state after the token before, which is in that token's block.
_STATE_WINDOW = 2


class Windows(NamedTuple):
    """The windows of some layers. rate, selected, index_dim: as in Entries. layers: how many of them share a layer of
    the cache."""

    rate: int
    selected: int
    index_dim: int
    layers: int


class Place(NamedTuple):
    """The numbers of a layer's keys and of its states in the cache. states: None = it has no compressor."""

    keys: int
    states: int | None


def sharing(rate: int, dim: int, index_dim: int) -> int:
    """Return how many layers of the model share a layer of the cache, at least 0. index_dim: 0 = there is no indexer.

    Each has a row of a window. With indexers one row has the index keys of all of them.
    """
    rows = window_rows(rate)
    return min(rows - 1, dim // index_dim) if index_dim else rows


def cache_layers(
    kinds: list[Windows | None], **how: Any
) -> tuple[tuple[AttentionSpec, ...], tuple[Place, ...], tuple[int, ...]]:
    """Return the specs of all layers of the cache, the places of the model's layers, and the layers of the cache that
    begin with a layer of the model which shares none with those before it.

    kinds: the windows of each layer of the model; None = it has no entries. how: the other fields of CompressedSpec.
    """
    specs: list[AttentionSpec] = []
    places: list[Place] = []
    starts: list[int] = []
    states = AttentionSpec(scale=how["scale"], window=_STATE_WINDOW)
    for unit in _units(kinds):
        starts.append(len(specs))
        own = len(places)
        for kind in unit:
            specs += [states] if kind is not None else []
            places.append(Place(len(specs), len(specs) - 1 if kind is not None else None))
            specs.append(CompressedSpec(**how))
        for kind in dict.fromkeys(filter(None, unit)):
            members = [place for place, other in zip(places[own:], unit, strict=True) if other == kind]
            for number, place in enumerate(members):
                entries = Entries(
                    layer=len(specs), place=number, rate=kind.rate, selected=kind.selected, index_dim=kind.index_dim
                )
                specs[place.keys] = CompressedSpec(**how, entries=entries)
            specs.append(AttentionSpec(scale=how["scale"]))
    return tuple(specs), tuple(places), tuple(starts)


def _units(kinds: list[Windows | None]) -> list[list[Windows | None]]:
    """Divide consecutive layers into those that share layers of the cache with each other."""
    units: list[list[Windows | None]] = []
    for kind in kinds:
        if not units or (kind is not None and units[-1].count(kind) == kind.layers):
            units.append([])
        units[-1].append(kind)
    return units


def own_places(stage: Stage, places: tuple[Place, ...], starts: tuple[int, ...], layers: int) -> range:
    """Return which of the model's layers a stage has. layers: of the cache."""
    own = stage.layers(layers, starts)
    inside = [number for number, place in enumerate(places) if place.keys in own]
    return range(inside[0], inside[-1] + 1)
