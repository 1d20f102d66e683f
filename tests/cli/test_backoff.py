from baton_cli.backoff import Backoff


def test_doubles_up_to_its_limit() -> None:
    backoff = Backoff()
    waits = [backoff.after_failure(health_s=0) for _ in range(9)]
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_starts_over_only_after_enough_health() -> None:
    backoff = Backoff()
    assert [backoff.after_failure(health_s=59.9) for _ in range(3)] == [0.5, 1, 2]
    assert backoff.after_failure(health_s=60) == 0.5
    assert backoff.after_failure(health_s=0) == 1
