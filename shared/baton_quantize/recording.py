"""Records what the linear layers of a layer multiply, while the layer runs over calibration text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from baton_engine.config import ConfigError
from baton_engine.experts_method import ExpertNames, ExpertsMethod
from baton_engine.inputs import NUMBERS, InputRows, Inputs
from baton_engine.quantization.dense import DENSE
from baton_engine.source import Method, Outputs, Product, Source


class Site:
    """Projections that are multiplied with the same inputs x, and what is known of x.

    names: the full names of the projections, in the order in which their outputs are stacked.
    products: the sum of x xᵀ over all tokens, [inputs, inputs] float32; empty before the first token.
    magnitudes: the sum of |x|, [inputs] float32. tokens: how many were recorded. folded: the scales [inputs] by which
    the inputs are divided now.
    """

    def __init__(self, names: Sequence[str], inputs: int, device: torch.device) -> None:
        self.names, self.inputs = tuple(names), inputs
        self.products = torch.zeros(0, device=device)
        self.magnitudes = torch.zeros(inputs, device=device)
        self.tokens = 0
        self.folded = torch.ones(inputs, device=device)

    def add(self, x: torch.Tensor) -> None:
        """x: [T, inputs]."""
        if not len(self.products):
            self.products = torch.zeros(self.inputs, self.inputs, device=x.device)
        numbers = x.float()
        self.products.addmm_(numbers.t(), numbers)
        self.magnitudes += numbers.abs().sum(dim=0)
        self.tokens += len(x)

    def hessian(self) -> torch.Tensor:
        """Return the mean of x xᵀ, [inputs, inputs]. It is proportional to the second derivative of the squared error
        of the outputs by a row of the weight. Raises ConfigError if it is not finite."""
        if not self.tokens:
            return torch.zeros(self.inputs, self.inputs, device=self.magnitudes.device)
        mean = self.products / self.tokens
        if not bool(torch.isfinite(mean).all()):
            raise ConfigError(f"the inputs of {self.names[0]} are not finite numbers; calibrate with --dtype float32")
        return mean


class Recorder:
    """The policy of a layer that is not quantized and whose inputs are recorded.

    sites: in the order of loading. recording: set it to False to run the layer without recording.
    """

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.recording = True

    def __call__(self, name: str, sensitive: bool, stored: Callable[[str], bool]) -> Method:
        return DENSE if sensitive else _RecordingMethod(self)


@dataclass(frozen=True)
class _RecordingMethod:
    """The method of weights that are not quantized, with products that record their inputs."""

    recorder: Recorder

    def load(
        self,
        source: Source,
        taken: list[Outputs],
        inputs: int,
        columns: slice,
        bias: bool,
        order: Sequence[int] | None,
        transposed: bool,
    ) -> Product:
        site = Site([source.full_name(each.name) for each in taken], inputs, source.device)
        self.recorder.sites.append(site)
        product = DENSE.load(source, taken, inputs, columns, bias, order, transposed)
        return _Recording(product, site, self.recorder)

    def weight(self, source: Source, taken: Outputs, inputs: int, columns: slice) -> torch.Tensor:
        raise ConfigError(f"{source.full_name(taken.name)} is not used as a product, so its inputs cannot be recorded")

    def experts(self, source: Source, names: ExpertNames, experts: int, hidden: int, size: int) -> ExpertsMethod:
        def product(expert: Source, parts: list[str], outputs: int, inputs: int) -> Product:
            taken = [Outputs(name, outputs, slice(0, outputs)) for name in parts]
            return self.load(expert, taken, inputs, slice(0, inputs), False, None, False)

        # The projection of the output first, as in a layer's other parts.
        return _RecordingExperts([
            (
                product(source.at(str(number)), [names.down], hidden, size),
                product(source.at(str(number)), names.inner, size, hidden),
            )
            for number in range(experts)
        ])  # fmt: skip


class _RecordingExperts:
    """Experts as products that record their inputs: of each its output, and its gates and ups."""

    def __init__(self, experts: list[tuple[Product, Product]]) -> None:
        self._experts = experts

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        for number in sorted(set(experts.flatten().tolist())):
            tokens, choices = torch.where(experts == number)
            down, gate_up = self._experts[number]
            result = down(gate_up.gated(x[tokens], "silu", down.inputs)).float()
            out.index_add_(0, tokens, result * weights[tokens, choices, None])
        return out.to(x.dtype)


class _Recording:
    inputs = NUMBERS

    def __init__(self, product: Product, site: Site, recorder: Recorder) -> None:
        self._product, self._site, self._recorder = product, site, recorder

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self._record(x)
        return self._product(x, out)

    def gated(self, x: torch.Tensor, activation: str, into: Inputs) -> InputRows:
        self._record(x)
        return self._product.gated(x, activation, into)

    def _record(self, x: torch.Tensor) -> None:
        if self._recorder.recording:
            self._site.add(x)
