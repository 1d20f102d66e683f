"""A real Baton under requests made from OpenAI's own specification. Run by `make conformance`, in a venv of its own."""
