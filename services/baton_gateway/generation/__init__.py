"""Requests while they run on pods: each prompt, and each pod that it runs on."""
