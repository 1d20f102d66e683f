"""Settings of `baton bench serve`: flags, or environment variables `BATON_BENCH_…`."""

import secrets
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

Lengths = tuple[int, int]
"""The smallest and the largest length, in tokens."""


class BenchSettings(BaseSettings):
    """Send requests to one or several OpenAI endpoints and measure the answers.

    Requests are sent at times that are planned beforehand: a slow answer does not delay the next request."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_BENCH_",
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        extra="ignore",
    )

    target: Annotated[list[str], NoDecode] = ["baton=http://127.0.0.1:8000"]
    """Server to measure, as name=url or url. With several of them, the servers are measured one after the other, with
    the same arrivals."""
    admin_url: Annotated[list[str], NoDecode] = []
    """Admin port of a Baton gateway, as url or, with several targets, name=url. The state of its pods is read there
    once a second."""
    model: str = ""
    """Name of the model in requests. Empty: the first model that the server lists."""
    api_key: SecretStr = SecretStr("")
    """API key that is sent to the servers."""

    rates: Annotated[list[float], NoDecode] = [1.0]
    """Arrivals per second. Several values, separated by commas, are measured as separate loads. With --turns, each
    arrival starts a conversation."""
    burstiness: float = Field(default=1.0, gt=0)
    """Shape of the gamma distribution of the times between arrivals: 1 gives Poisson arrivals, less gives bursts."""
    steps: Annotated[list[tuple[float, float]], NoDecode] = []
    """Instead of --rates: one load whose rate changes, as rate:seconds,rate:seconds,…"""
    trace: Path | None = None
    """Instead of --rates: a recorded trace. A .csv file has Azure's format, any other file has JSON lines as Mooncake's
    traces."""
    speeds: Annotated[list[float], NoDecode] = [1.0]
    """Factor by which the requests of the trace arrive faster than recorded. Several values, separated by commas, are
    measured as separate loads."""
    length_scale: float = Field(default=1.0, gt=0)
    """Factor for all lengths in the trace."""
    seconds: float = Field(default=60.0, gt=0)
    """Duration of the arrivals of a load, in seconds."""
    requests: int | None = Field(default=None, ge=1)
    """Number of arrivals after which a load ends even before --seconds are over."""

    input_tokens: Annotated[Lengths, NoDecode] = (512, 512)
    """Length of prompts, as N or LEAST-MOST. With --turns, the length of the text that each turn adds."""
    output_tokens: Annotated[Lengths, NoDecode] = (128, 128)
    """Length of answers, as N or LEAST-MOST."""
    shared_prefix_tokens: int = Field(default=0, ge=0)
    """Tokens that all prompts of a load begin with, before their own."""
    turns: int = Field(default=1, ge=1)
    """Requests of a conversation. Each one contains the conversation so far and has the header x-session-id."""
    think_s: float = Field(default=1.0, ge=0)
    """Seconds between an answer and the next turn."""
    cancel_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the requests that the client cancels in the middle of the answer."""
    too_long: Literal["drop", "clip"] = "drop"
    """Whether requests that are too long for the model are left out or shortened. Their number is reported."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Largest number of tokens of prompt and answer together. By default the limit that the servers report, if any."""
    highest_token: int | None = Field(default=None, ge=1)
    """Largest token id in prompts. By default the largest of 30000, 2000, 500 and 250 that the servers accept."""
    prompt_as: Literal["auto", "ids", "text", "chat"] = "auto"
    """Whether prompts are sent as token ids, as text of about as many tokens, or as chats. auto takes the first of them
    that works."""
    temperature: float = Field(default=0.6, ge=0, le=2)
    """Sampling temperature."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which a request counts as failed."""
    warmup: int = Field(default=2, ge=0)
    """Number of requests that are sent to each server before the first load, one after the other, without being
    measured."""
    seed: int | None = None
    """Runs with the same seed have the same arrivals, lengths and prompts. By default each run has a new seed, because
    a server may still have the prompts of the previous run cached."""

    ttft_slo_ms: float | None = Field(default=None, gt=0)
    """Longest time to first token with which a request counts for the goodput."""
    tpot_slo_ms: float | None = Field(default=None, gt=0)
    """Longest time per output token after the first with which a request counts for the goodput."""
    json_file: Path | None = None
    """JSON file to write, with the parameters, the results and every request."""
    html_file: Path | None = None
    """HTML file to write, with a report and charts."""

    @field_validator("target", "admin_url", "rates", "speeds", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    @field_validator("steps", mode="before")
    @classmethod
    def _split_steps(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        parts = [part.split(":") for part in value.split(",")]
        if any(len(part) != 2 for part in parts):
            raise ValueError("must be rate:seconds,rate:seconds,…")
        return parts

    @field_validator("input_tokens", "output_tokens", mode="before")
    @classmethod
    def _split_lengths(cls, value: Any) -> Any:
        if not isinstance(value, str | int):
            return value
        least, _, most = str(value).partition("-")
        return least, most or least

    @field_validator("input_tokens", "output_tokens")
    @classmethod
    def _check_lengths(cls, value: Lengths) -> Lengths:
        if not 1 <= value[0] <= value[1]:
            raise ValueError("must be N or LEAST-MOST, and at least 1")
        return value

    @field_validator("rates", "speeds")
    @classmethod
    def _check_positive(cls, values: list[float]) -> list[float]:
        if not values or min(values) <= 0:
            raise ValueError("must be greater than 0")
        return values

    @field_validator("steps")
    @classmethod
    def _check_steps(cls, steps: list[tuple[float, float]]) -> list[tuple[float, float]]:
        if any(rate <= 0 or seconds <= 0 for rate, seconds in steps):
            raise ValueError("rates and seconds must be greater than 0")
        return steps

    @model_validator(mode="after")
    def _check(self) -> "BenchSettings":
        if self.trace is not None and (self.steps or self.turns > 1):
            raise ValueError("--trace excludes --steps and --turns")
        names = [name for name, _ in self.targets]
        if len(set(names)) < len(names):
            raise ValueError("--target: each needs a name of its own")
        unknown = self.admin_urls.keys() - set(names)
        if unknown:
            raise ValueError(f"--admin-url: no --target is called {sorted(unknown)[0]!r}")
        if self.seed is None:
            self.seed = secrets.randbelow(2**31)
        return self

    @property
    def targets(self) -> list[tuple[str, str]]:
        """The name and the URL of each target."""
        return [_named(target, target.partition("://")[2] or target) for target in self.target]

    @property
    def admin_urls(self) -> dict[str, str]:
        """The admin URLs, by name of the target."""
        first = self.targets[0][0]
        return dict(_named(url, first) for url in self.admin_url)

    @property
    def steps_text(self) -> str:
        return ",".join(f"{rate:g}:{seconds:g}" for rate, seconds in self.steps)


def _named(text: str, default: str) -> tuple[str, str]:
    """Return name and URL of "name=url", or the default name and the URL."""
    name, equals, url = text.partition("=")
    return (name, url) if equals and "/" not in name else (default, text)
