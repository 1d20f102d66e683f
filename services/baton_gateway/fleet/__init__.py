"""The connections to pods, which pods there are, and which models they serve."""
