"""Parsing a gateway's report, valid or not."""

import pytest

from baton_controller.report import parse_report

PODS = b'{"pods": []}'
NAME = "baton_gateway_revision_requests_total"
TTFT = "baton_gateway_revision_time_to_first_token_seconds_bucket"


def metrics(name: str, labels: str, value: str) -> str:
    family, kind = (NAME, "counter") if name == NAME else (TTFT.removesuffix("_bucket"), "histogram")
    return f'# TYPE {family} {kind}\n{name}{{model="m",revision="r",{labels}}} {value}\n'


def test_counts_are_read() -> None:
    text = metrics(NAME, 'outcome="ok"', "3") + metrics(TTFT, 'le="0.5"', "2")
    reading = parse_report(text, PODS).readings["m"]
    assert (reading.revisions["r"].ok, reading.revisions["r"].ttft) == (3.0, {"0.5": 2.0})


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e300"])
@pytest.mark.parametrize(("name", "labels"), [(NAME, 'outcome="ok"'), (TTFT, 'le="0.5"')])
def test_no_count_is_no_report(name: str, labels: str, value: str) -> None:
    with pytest.raises(ValueError, match="not a count"):
        parse_report(metrics(name, labels, value), PODS)


@pytest.mark.parametrize("labels", ['le="NaN"', 'le="x"', 'le="-1"'])
def test_a_bound_is_a_positive_number(labels: str) -> None:
    with pytest.raises(ValueError, match=r"bucket|float"):
        parse_report(metrics(TTFT, labels, "1"), PODS)


def test_an_outcome_is_one_of_two() -> None:
    with pytest.raises(ValueError, match="unknown outcome 'ttft'"):
        parse_report(metrics(NAME, 'outcome="ttft"', "1"), PODS)


def test_buckets_are_bounded() -> None:
    with pytest.raises(ValueError, match="more than 100 buckets"):
        parse_report("".join(metrics(TTFT, f'le="{bound}"', "1") for bound in range(1, 200)), PODS)
