"""The bodies that clients send, their checks, and the parameters for pods that follow from them."""
