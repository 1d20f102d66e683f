"""What tenants use, and what they are refused."""

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
    "Requests, tokens and refusals by tenant. Those without a limit have no line where it is about limits.",
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
                    "Requests being answered.",
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
                    "rate_limit_exceeded, insufficient_quota: the tenant's own limits. server_is_overloaded: no room.",
                    REQUESTS,
                    Query(_total("refused_requests", "tenant", "reason"), "{{tenant}}: {{reason}}"),
                ),
                lines(
                    "Share of requests refused",
                    "Of all that a tenant has sent.",
                    SHARE,
                    Query(
                        share(_total("refused_requests", "tenant"), _total("tenant_requests", "tenant")), "{{tenant}}"
                    ),
                ),
                lines(
                    "Requests per minute, of the limit",
                    "1: as many as allowed.",
                    SHARE,
                    Query(
                        share(f"{_total('tenant_requests', 'tenant')} {_PER_MINUTE}", _limit("requests_per_minute")),
                        "{{tenant}}",
                    ),
                ),
                lines(
                    "Tokens per minute, of the limit",
                    "1: as many as allowed.",
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
