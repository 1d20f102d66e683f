"""PromQL of the panels. Every query selects series by the dashboard's variables."""

from collections.abc import Iterable

_NAMESPACE = 'namespace=~"$namespace"'
_MODEL = 'model=~"$model"'
_REVISION = 'revision=~"$revision"'


def gateway(name: str, *matchers: str) -> str:
    """Select a gateway's metric, of all models."""
    return _selector(f"baton_gateway_{name}", _NAMESPACE, *matchers)


def of_model(name: str, *matchers: str) -> str:
    """Select a gateway's metric of the selected models."""
    return gateway(name, _MODEL, *matchers)


def of_revision(name: str, *matchers: str) -> str:
    """Select a gateway's metric of the selected revisions."""
    return of_model(f"revision_{name}", _REVISION, *matchers)


def worker(name: str, *matchers: str) -> str:
    """Select a metric under Baton's name, of pods of the selected revisions."""
    return _selector(f"baton_{name}", _NAMESPACE, _MODEL, _REVISION, *matchers)


def recorded(name: str) -> str:
    """Select a series that a recording rule of the chart computes for the selected models."""
    return _selector(f"baton:{name}", _NAMESPACE, _MODEL)


def objective(name: str) -> str:
    """Select a service level objective, which the chart's rules record from the values."""
    return _selector(f"baton:slo_{name}", _NAMESPACE)


def controller(name: str) -> str:
    return _selector(f"baton_controller_{name}", _NAMESPACE, _MODEL)


def vllm(name: str) -> str:
    """Select a metric under vLLM's name, of all pods. `of_role` narrows it down."""
    return _selector(f"vllm:{name}", _NAMESPACE)


def of_role(role: str, expression: str) -> str:
    """Keep only pods of a role and of the selected models and revisions. vLLM's metrics lack these labels, so the
    expression is joined with worker_info."""
    info = worker("worker_info", f'role="{role}"')
    return f"{expression} * on (namespace, instance) group_left (revision) {info}"


def rate(selector: str) -> str:
    return f"rate({selector}[$__rate_interval])"


def total(expression: str, *by: str) -> str:
    return _aggregate("sum", expression, by)


def count(expression: str, *by: str) -> str:
    return _aggregate("count", expression, by)


def share(part: str, whole: str) -> str:
    """Divide two sums that have the same labels. If the whole is 0, there is no result instead of NaN."""
    return f"{part} / ({whole} > 0)"


def shares(rates: str, label: str) -> str:
    """Return the share of the total that each value of a label has."""
    return f"{total(rates, label)} / ignoring ({label}) group_left () ({total(rates)} > 0)"


def quantile(q: float | str, expression: str, *by: str) -> str:
    """Return a quantile. expression: the rates of a histogram's buckets. q: a number or a dashboard variable."""
    return f"histogram_quantile({q}, {total(expression, 'le', *by)})"


def buckets(name: str) -> str:
    """Return the rates of the buckets of one of vLLM's histograms."""
    return rate(vllm(f"{name}_bucket"))


def _selector(name: str, *matchers: str) -> str:
    return f"{name}{{{', '.join(matchers)}}}"


def _aggregate(operation: str, expression: str, by: Iterable[str]) -> str:
    labels = ", ".join(by)
    return f"{operation} by ({labels}) ({expression})" if labels else f"{operation}({expression})"
