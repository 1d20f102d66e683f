"""The config of models whose layers have different heads."""

from typing import Any

import msgspec

from baton_common.kv_layout import KvLayout


class WithHeadsByLayer:
    """A part of the config of such a model, whose num_kv_heads is that of the layers with the most key-value heads."""

    def of_layer(self, layer: int) -> Any:
        """Return the config with the heads of a layer as those of all."""
        raise NotImplementedError

    def kv_layout(self, dtype: str) -> KvLayout:
        config: Any = self
        whole: KvLayout = super().kv_layout(dtype)  # type: ignore[misc]
        each = [self.of_layer(layer) for layer in range(whole.num_layers)]
        heads = tuple((layer.num_kv_heads, layer.head_dim, layer.value_dim) for layer in each)
        if set(heads) == {(config.num_kv_heads, *(plane.dim for plane in whole.planes))}:
            return whole
        planes = []
        for index, plane in enumerate(whole.planes):
            room = (-(-count * dims[index] // plane.heads) for count, *dims in heads)
            planes.append(msgspec.structs.replace(plane, dim=max(plane.dim, *room)))
        return msgspec.structs.replace(whole, planes=tuple(planes), heads=heads)
