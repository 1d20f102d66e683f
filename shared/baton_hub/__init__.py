"""Models by hub id: downloads the files that Baton reads of a model into the cache of Hugging Face's own tools."""
