"""The value that stands for a token that cannot be drawn. It is separate for processes that do not import torch."""

NOT_FINITE = -1  # the token of a row with a NaN or +inf; -inf only marks a token that must not be drawn
