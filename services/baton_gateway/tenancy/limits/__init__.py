"""Stores that count the usage of each tenant against its limits."""
