"""The usage of tenants, and their refused requests."""

from .board import Board
from .panels import COUNT, REQUESTS, SHARE, TOKENS, Query, lines
from .queries import gateway, rate, share, total

_TENANT = 'tenant=~"$tenant"'
_PER_MINUTE = "* 60"


def _total(name: str, *by: str) -> str:
    return total(rate(gateway(f"{name}_total", _TENANT)), *by)


def _limit(limit: str) -> str:
    limits = gateway("tenant_limit", _TENANT, f'limit="{limit}"')
    return f"max by (tenant) ({limits})"


TENANTS = Board(
    "tenants",
    "Tenants",
    "Requests, tokens and refusals by tenant. Tenants without a limit have no line in the panels about that limit.",
    rows=[
        (
            "Use",
            [
                lines(
                    "Requests",
                    "By tenant.",
                    REQUESTS,
                    Query(_total("tenant_requests", "tenant"), "{{tenant}}"),
                    stacked=True,
                ),
                lines(
                    "In flight",
                    "Requests in progress.",
                    COUNT,
                    Query(total(gateway("tenant_requests_in_flight", _TENANT), "tenant"), "{{tenant}}"),
                    stacked=True,
                ),
                lines(
                    "Tokens of prompts",
                    "By tenant.",
                    TOKENS,
                    Query(
                        total(rate(gateway("tenant_tokens_total", _TENANT, 'kind="prompt"')), "tenant"), "{{tenant}}"
                    ),
                    stacked=True,
                ),
                lines(
                    "Tokens of answers",
                    "By tenant.",
                    TOKENS,
                    Query(
                        total(rate(gateway("tenant_tokens_total", _TENANT, 'kind="generation"')), "tenant"),
                        "{{tenant}}",
                    ),
                    stacked=True,
                ),
            ],
        ),
        (
            "Limits",
            [
                lines(
                    "Refused, by tenant and reason",
                    "rate_limit_exceeded, insufficient_quota: limits of the tenant. server_is_overloaded: capacity.",
                    REQUESTS,
                    Query(_total("refused_requests", "tenant", "reason"), "{{tenant}}: {{reason}}"),
                ),
                lines(
                    "Share of requests refused",
                    "Refused requests divided by all requests of the tenant.",
                    SHARE,
                    Query(
                        share(_total("refused_requests", "tenant"), _total("tenant_requests", "tenant")), "{{tenant}}"
                    ),
                ),
                lines(
                    "Requests per minute, of the limit",
                    "The tenant's rate divided by its limit.",
                    SHARE,
                    Query(
                        share(f"{_total('tenant_requests', 'tenant')} {_PER_MINUTE}", _limit("requests_per_minute")),
                        "{{tenant}}",
                    ),
                ),
                lines(
                    "Tokens per minute, of the limit",
                    "The tenant's rate divided by its limit.",
                    SHARE,
                    Query(
                        share(f"{_total('tenant_tokens', 'tenant')} {_PER_MINUTE}", _limit("tokens_per_minute")),
                        "{{tenant}}",
                    ),
                ),
            ],
        ),
    ],
    by_model=False,
    by_tenant=True,
)
