"""The number of threads that an engine gets on CPU, and whether they spin or sleep while they wait."""

from typing import Any

import pytest

from baton_demo import MODEL_DIR
from baton_engine.config import EngineConfig
from baton_engine.model_config import ModelConfig
from baton_engine.models.registry import load_model_config, parse_model_config
from baton_engine.threads import Threads, choose_threads, waiting_environment

SLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}
SPIN: dict[str, str] = {}
DEMO = load_model_config(MODEL_DIR)


def llama(hidden: int, intermediate: int, heads: int, kv_heads: int) -> ModelConfig:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 12,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 32_000,
    }
    return parse_model_config(config)


SMALL = llama(768, 2048, 12, 4)  # 100 million parameters
LARGE = llama(4096, 14336, 32, 8)  # Llama 3.1 8B


def choose(model: ModelConfig, cores: float, environ: dict[str, str] = SLEEP, **settings: Any) -> Threads:
    return choose_threads(EngineConfig(model="", **settings), model.layer_weights, cores, environ)


@pytest.mark.parametrize("environ", [SPIN, SLEEP])
def test_a_tiny_model_gets_one_thread(environ: dict[str, str]) -> None:
    assert choose(DEMO, 64, environ).count == 1


def test_a_large_model_gets_all_cores() -> None:
    assert choose(LARGE, 16).count == 16
    assert choose(LARGE, 16, SPIN).count == 16


def test_threads_that_sleep_need_more_work_than_threads_that_spin() -> None:
    assert choose(SMALL, 2, SPIN) == Threads(2, True, "2 cores for one engine, 6.3 million weights in a layer")
    assert choose(SMALL, 2, SLEEP) == Threads(1, False, "2 cores for one engine, 6.3 million weights in a layer")


@pytest.mark.parametrize(("cores", "engines", "count"), [(2, 2, 1), (8, 2, 4), (8, 3, 2), (2, 5, 1), (8, 1, 8)])
def test_engines_divide_the_cores(cores: float, engines: int, count: int) -> None:
    assert choose(LARGE, cores, engines_sharing_cpu=engines).count == count


@pytest.mark.parametrize(("cores", "count"), [(0.25, 1), (1.5, 1), (1.999, 1), (2.5, 2), (3.0, 3)])
def test_a_fraction_of_a_core_is_no_thread_unless_there_is_no_other(cores: float, count: int) -> None:
    assert choose(LARGE, cores).count == count


def test_the_setting_overrides_all() -> None:
    chosen = choose(DEMO, 1, SPIN, num_threads=7, engines_sharing_cpu=3)
    assert chosen == Threads(7, True, "as --num-threads says")


def test_a_single_thread_has_nothing_to_spin_for() -> None:
    assert not choose(DEMO, 8, SPIN).spin


@pytest.mark.parametrize(
    ("environ", "spin"),
    [
        ({}, True),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, False),
        ({"OMP_WAIT_POLICY": " passive "}, False),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, True),
        ({"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "0"}, False),
        ({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}, True),
        ({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": ""}, False),
    ],
)
def test_how_threads_wait_is_read_as_libgomp_reads_it(environ: dict[str, str], spin: bool) -> None:
    assert choose(LARGE, 4, environ).spin is spin


@pytest.mark.parametrize("engines", [None, 2, 5])
def test_threads_sleep_unless_the_engine_has_its_cores_alone(engines: int | None) -> None:
    assert waiting_environment(engines, {"PATH": "/bin"}) == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert waiting_environment(engines, {"OMP_WAIT_POLICY": ""}) == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert waiting_environment(1, {"PATH": "/bin"}) == {}


@pytest.mark.parametrize("set_by_user", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "500"}])
def test_what_the_user_has_set_stays(set_by_user: dict[str, str]) -> None:
    assert waiting_environment(2, set_by_user) == {}
