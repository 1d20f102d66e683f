"""Flags, environment and errors of a settings class."""

from typing import Literal

import pytest
from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from baton_cli.errors import BadSetting
from baton_cli.service_settings import settings_from


class Sample(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="BATON_")

    block_size: int = Field(default=16, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    enable_prefix_caching: bool = True
    addresses: list[str] = Field(default_factory=list)
    secret: SecretStr | None = None

    @model_validator(mode="after")
    def _fits(self) -> "Sample":
        if self.dtype == "bfloat16" and self.block_size > 64:
            raise ValueError("block_size: at most 64 with bfloat16")
        return self


def read(*args: str) -> Sample:
    return settings_from(args, Sample, "baton sample")


def refusal(*args: str) -> str:
    with pytest.raises(BadSetting) as caught:
        read(*args)
    return str(caught.value)


def test_flags_are_kebab_case_and_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_BLOCK_SIZE", "32")
    monkeypatch.setenv("BATON_DTYPE", "bfloat16")
    assert read().block_size == 32
    settings = read("--block-size", "8", "--no-enable-prefix-caching", "--addresses", "a:1,b:2")
    assert settings.block_size == 8
    assert settings.dtype == "bfloat16"
    assert settings.enable_prefix_caching is False
    assert settings.addresses == ["a:1", "b:2"]


def test_every_bad_setting_is_named_by_flag_and_variable() -> None:
    lines = refusal("--block-size", "0", "--dtype", "int8").splitlines()
    assert lines == [
        "--block-size (or BATON_BLOCK_SIZE): Input should be greater than or equal to 1",
        "--dtype (or BATON_DTYPE): Input should be 'float32' or 'bfloat16'",
    ]


def test_a_check_of_several_settings_speaks_for_itself() -> None:
    assert refusal("--dtype", "bfloat16", "--block-size", "128") == "block_size: at most 64 with bfloat16"


def test_an_unknown_flag_is_named() -> None:
    assert refusal("--blocks", "3") == "unrecognized arguments: --blocks 3"


def test_a_broken_variable_is_named_without_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_ADDRESSES", "[hush")
    message = refusal()
    assert "addresses" in message
    assert "hush" not in message
