"""Decides which pods a request goes to, and when. Plain state and a clock: no network and no event loop."""
