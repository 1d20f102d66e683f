"""Several kinds of latent attention through torch's scaled_dot_product_attention."""

from .latents_by_layer import LatentsByLayer
from .torch_indexed import TorchIndexed
from .torch_latent import TorchLatent


class TorchLatentsByLayer(LatentsByLayer):
    name = "torch_sdpa"
    kind = TorchLatent
    selecting_kind = TorchIndexed
