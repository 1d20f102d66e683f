"""Tests of real processes, from the HTTP request to the KV blocks."""
