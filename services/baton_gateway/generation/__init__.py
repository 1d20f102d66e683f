"""Runs requests on pods: the prompts of a request, and the pods on which each prompt runs."""
