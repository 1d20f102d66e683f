"""Faults on a real fleet under load, seeded and replayable.

A fleet is a gateway, three prefill and three decode workers, each behind a proxy. While clients keep asking, scenarios
kill, stop and drain workers, freeze and cut their connections, and damage the KV pieces on their way; every answer must
be, token for token, the one that the same fleet gives undisturbed.

CHAOS_SEED=N        repeats the faults, their order and parameters, and the requests; each run prints its seed
CHAOS_SCENARIOS=N   scenarios of test_faults; `make chaos` runs 2000
"""
