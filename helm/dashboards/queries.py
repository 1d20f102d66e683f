"""PromQL of the panels. Every query looks at what the dashboard's variables choose."""

from collections.abc import Iterable

_NAMESPACE = 'namespace=~"$namespace"'
_MODEL = 'model=~"$model"'
_REVISION = 'revision=~"$revision"'


def gateway(name: str, *matchers: str) -> str:
    """Select a gateway's metric that is not of a model."""
    return _selector(f"baton_gateway_{name}", _NAMESPACE, *matchers)


def of_model(name: str, *matchers: str) -> str:
    """Select a gateway's metric of the chosen models."""
    return gateway(name, _MODEL, *matchers)


def of_revision(name: str, *matchers: str) -> str:
    """Select a gateway's metric of the chosen revisions."""
    return of_model(f"revision_{name}", _REVISION, *matchers)


def worker(name: str, *matchers: str) -> str:
    """Select one of Baton's own metrics of pods of the chosen revisions."""
    return _selector(f"baton_{name}", _NAMESPACE, _MODEL, _REVISION, *matchers)


def recorded(name: str) -> str:
    """Select what a rule of the chart has recorded of the chosen models."""
    return _selector(f"baton:{name}", _NAMESPACE, _MODEL)


def promised(name: str) -> str:
    """Select a bound that the chart's rules have recorded."""
    return _selector(f"baton:slo_{name}", _NAMESPACE)


def controller(name: str) -> str:
    return _selector(f"baton_controller_{name}", _NAMESPACE, _MODEL)


def vllm(name: str) -> str:
    """Select a metric under vLLM's name, of all pods; see `of_role`."""
    return _selector(f"vllm:{name}", _NAMESPACE)


def of_role(role: str, expression: str) -> str:
    """Keep the pods of a role, and of the chosen models and revisions, of which vLLM's labels say nothing."""
    info = worker("worker_info", f'role="{role}"')
    return f"{expression} * on (namespace, instance) group_left (revision) {info}"


def rate(selector: str) -> str:
    return f"rate({selector}[$__rate_interval])"


def total(expression: str, *by: str) -> str:
    return _aggregate("sum", expression, by)


def count(expression: str, *by: str) -> str:
    return _aggregate("count", expression, by)


def share(part: str, whole: str) -> str:
    """Divide two sums by the same labels, with no result rather than NaN where there is nothing to divide by."""
    return f"{part} / ({whole} > 0)"


def shares(rates: str, label: str) -> str:
    """Say how much of the whole each value of a label has."""
    return f"{total(rates, label)} / ignoring ({label}) group_left () ({total(rates)} > 0)"


def quantile(q: float | str, expression: str, *by: str) -> str:
    """Take a quantile of the rates of a histogram's buckets. q: a number or a variable."""
    return f"histogram_quantile({q}, {total(expression, 'le', *by)})"


def buckets(name: str) -> str:
    """Return the rates of the buckets of one of vLLM's histograms."""
    return rate(vllm(f"{name}_bucket"))


def _selector(name: str, *matchers: str) -> str:
    return f"{name}{{{', '.join(matchers)}}}"


def _aggregate(operation: str, expression: str, by: Iterable[str]) -> str:
    labels = ", ".join(by)
    return f"{operation} by ({labels}) ({expression})" if labels else f"{operation}({expression})"
