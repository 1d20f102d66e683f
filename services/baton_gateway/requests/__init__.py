"""Request bodies, their checks, and the parameters for pods that are derived from them."""
