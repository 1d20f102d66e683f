"""The results of all measurements."""

import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from baton_bench.answer import Answer
from baton_bench.load import LoadResult
from baton_bench.settings import BenchSettings
from baton_bench.summary import Slo, summarize
from baton_bench.target import Target


@dataclass
class Report:
    """Targets and loads in the order in which they were measured."""

    settings: BenchSettings
    date: datetime = field(default_factory=lambda: datetime.now(UTC))
    targets: list[Target] = field(default_factory=list)
    results: list[LoadResult] = field(default_factory=list)

    @property
    def summaries(self) -> list[dict[str, Any]]:
        slo = Slo.of(self.settings)
        return [summarize(result, slo) for result in self.results]

    @property
    def good(self) -> bool:
        """Whether every load had an answer."""
        return all(any(answer.outcome != "failed" for answer in result.answers) for result in self.results)

    def json(self) -> dict[str, Any]:
        """Return parameters, summaries and requests; times of requests in seconds since their load began."""
        return {
            "date": self.date.isoformat(timespec="seconds"),
            "baton": _version(),
            "client": {"python": platform.python_version(), "platform": platform.platform()},
            "parameters": self.settings.model_dump(mode="json", exclude={"api_key"}),
            "targets": [
                {
                    "name": target.name,
                    "url": target.url,
                    "dialect": asdict(target.dialect),
                    "max_model_len": target.max_model_len,
                    "itl_by": "token" if target.by_token else "chunk",
                }
                for target in self.targets
            ],
            "results": [
                {**summary, "requests_sent": [_request(answer) for answer in result.answers], "pods": _pods(result)}
                for summary, result in zip(self.summaries, self.results, strict=True)
            ],
        }


def _version() -> str | None:
    """Return Baton's version; None where Baton runs from its sources without being installed."""
    try:
        return version("baton")
    except PackageNotFoundError:
        return None


def _request(answer: Answer) -> dict[str, Any]:
    return {
        "due": round(answer.due, 6),
        "late": round(answer.sent - answer.due, 6),
        "ttft": answer.ttft,
        "tpot": answer.tpot,
        "e2e": answer.e2e,
        "end": round(answer.end, 6),
        "inputs": answer.inputs,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "asked": answer.asked,
        "tokens": answer.tokens,
        "outcome": answer.outcome,
        **({"error": answer.error, "detail": answer.detail} if answer.error else {}),
        **({"session": answer.session, "turn": answer.turn} if answer.session else {}),
    }


def _pods(result: LoadResult) -> list[dict[str, Any]]:
    return [asdict(sample) for sample in result.pods]
