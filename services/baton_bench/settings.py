"""Settings of `baton bench serve`: flags, or environment variables `BATON_BENCH_…`."""

import secrets
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

Lengths = tuple[int, int]
"""The least and the most, in tokens."""


class BenchSettings(BaseSettings):
    """Send requests to one or several OpenAI endpoints at given times, whatever they do, and measure the answers."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_BENCH_",
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        extra="ignore",
    )

    target: Annotated[list[str], NoDecode] = ["baton=http://127.0.0.1:8000"]
    """Server to measure, as name=url or url; repeated, the servers are measured one after the other, with the same
    arrivals."""
    admin_url: Annotated[list[str], NoDecode] = []
    """Admin port of a Baton, as url or, with several targets, name=url: its pods are watched once a second."""
    model: str = ""
    """Model to ask for. Empty: the first that the server lists."""
    api_key: SecretStr = SecretStr("")
    """Key to show to the servers."""

    rates: Annotated[list[float], NoDecode] = [1.0]
    """Arrivals a second, several separated by commas: each is a load of its own. With --turns, of conversations."""
    burstiness: float = Field(default=1.0, gt=0)
    """Shape of the gamma distribution of the times between arrivals: 1 is Poisson, less comes in bursts."""
    steps: Annotated[list[tuple[float, float]], NoDecode] = []
    """In place of --rates, one load whose rate changes: rate:seconds,rate:seconds,…"""
    trace: Path | None = None
    """In place of --rates, a recorded trace: .csv in Azure's format, anything else JSON lines in Mooncake's."""
    speeds: Annotated[list[float], NoDecode] = [1.0]
    """How many times as fast as recorded the trace's requests arrive, several separated by commas."""
    length_scale: float = Field(default=1.0, gt=0)
    """Factor of all lengths in the trace."""
    seconds: float = Field(default=60.0, gt=0)
    """Arrivals of a load end after so many seconds."""
    requests: int | None = Field(default=None, ge=1)
    """Or after so many of them, whichever is first."""

    input_tokens: Annotated[Lengths, NoDecode] = (512, 512)
    """Length of prompts, N or LEAST-MOST. With --turns, of what each turn adds."""
    output_tokens: Annotated[Lengths, NoDecode] = (128, 128)
    """Length of answers, N or LEAST-MOST."""
    shared_prefix_tokens: int = Field(default=0, ge=0)
    """Tokens that all prompts of a load begin with, before their own."""
    turns: int = Field(default=1, ge=1)
    """Requests of a conversation: each goes on with the answer to the one before and has the header x-session-id."""
    think_s: float = Field(default=1.0, ge=0)
    """Seconds between an answer and the next turn."""
    cancel_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the requests that the client leaves in the middle of the answer."""
    too_long: Literal["drop", "clip"] = "drop"
    """What happens to requests that are too long for the model; how many there were is told."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Tokens of prompt and answer that the model takes. Left out: what the servers say, if they do."""
    highest_token: int | None = Field(default=None, ge=1)
    """Largest token id in prompts. Left out: the largest of 30000, 2000, 500 and 250 that the servers take."""
    prompt_as: Literal["auto", "ids", "text", "chat"] = "auto"
    """Send prompts as token ids, as text of about as many tokens, or as chats; auto: the first of them that works."""
    temperature: float = Field(default=0.6, ge=0, le=2)
    """Sampling temperature."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds a request may take in all."""
    warmup: int = Field(default=2, ge=0)
    """Requests that each server gets before the first load, one after the other; they are not measured."""
    seed: int | None = None
    """Arrivals, lengths and content of prompts are the same for the same seed. Left out: another for each run, as a
    server may still have the prompts of the last one cached."""

    ttft_slo_ms: float | None = Field(default=None, gt=0)
    """Time to first token that a request must meet to count for the goodput."""
    tpot_slo_ms: float | None = Field(default=None, gt=0)
    """Time per output token after the first that it must meet as well."""
    json_file: Path | None = None
    """File that gets parameters, results and every request."""
    html_file: Path | None = None
    """File that gets a report with charts."""

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
        """Name and URL of each."""
        return [_named(target, target.partition("://")[2] or target) for target in self.target]

    @property
    def admin_urls(self) -> dict[str, str]:
        """By name of the target."""
        first = self.targets[0][0]
        return dict(_named(url, first) for url in self.admin_url)

    @property
    def steps_text(self) -> str:
        return ",".join(f"{rate:g}:{seconds:g}" for rate, seconds in self.steps)


def _named(text: str, otherwise: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    return (name, url) if equals and "/" not in name else (otherwise, text)
