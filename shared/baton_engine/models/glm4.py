"""GLM-4 of 2025 (GLM Team): GLM with one more norm after each block."""

from .glm import Glm, GlmLayer
from .normed_around import NormedAround


class Glm4Layer(NormedAround, GlmLayer):
    pass


class Glm4(Glm):
    layer = Glm4Layer
