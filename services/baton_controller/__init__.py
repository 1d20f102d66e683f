"""The controller of a release: takes canaries through their steps, and scales prefill and decode pods with the load."""
