"""The parts of a model that the gateway reads from its folder: tokenizer, chat template, sampling defaults."""
