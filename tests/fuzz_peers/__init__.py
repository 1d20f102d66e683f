"""Hostile and broken peers: odd messages to every port of the workers, beside a client that must notice nothing."""
