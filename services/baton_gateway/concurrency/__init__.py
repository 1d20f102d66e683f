"""Keeps any one request from holding up the others in the event loop, and tasks running."""
