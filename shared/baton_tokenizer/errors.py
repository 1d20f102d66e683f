"""What can be wrong with a model's tokenizer."""


class TokenizerError(ValueError):
    """A model folder's tokenizer is invalid, or of a kind that is not served. The message names the file."""


class NoTokenizerError(TokenizerError):
    """A model folder has no file of a tokenizer."""
