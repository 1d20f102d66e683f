"""Every endpoint of the gateway under bodies that nobody would send.

FUZZ_BODIES=N   bodies in all, 5,000 unless told; `make fuzz` sends 200,000
FUZZ_SEED=N     other bodies for every N; without it they are always the same
"""
