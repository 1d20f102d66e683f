"""The controller of a release: takes canaries through their steps, and sizes prefill and decode to the load."""
