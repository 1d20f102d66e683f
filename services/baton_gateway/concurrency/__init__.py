"""Keeps one request from blocking the event loop for the others, and restarts background tasks that fail."""
