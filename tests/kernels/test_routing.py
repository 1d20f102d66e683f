"""The choice of experts against its reference, and the reference against transformers' routers."""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.kolibri1.modeling_kolibri1 import Kolibri1TopKRouter
from transformers.models.laguna.modeling_laguna import LagunaTopKRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

from baton_kernels import routing as routing_kernels
from baton_kernels.reference.routing import NOT_OWN, Routing, choose_reference, route_reference
from baton_kernels.routing import choose, route, route_fixed

GROUPED = {"groups": 4, "used_groups": 2}
ROUTINGS = [
    (4, Routing(2, normalize=True)),
    (60, Routing(4)),
    (128, Routing(8, normalize=True)),
    (8, Routing(1, scale=0.5)),
    (32, Routing(4, sigmoid=True, normalize=True, scale=2.5)),
    (60, Routing(6, root_softplus=True, normalize=True, scale=1.5)),
    (60, Routing(6, sigmoid=True, normalize=True, added=0.5)),
    (60, Routing(6, sigmoid=True, normalize=True)),
    (60, Routing(6, sigmoid=True, normalize=True, corrects_logits=True)),
    (60, Routing(6, sigmoid=True, normalize=True, softcap=1.5)),
    (60, Routing(6, sigmoid=True, group_best=2, **GROUPED)),
    (160, Routing(6, scale=16.0, groups=8, used_groups=3)),
    (24, Routing(3, normalize=True, groups=3, used_groups=3)),
    (20, Routing(10, sigmoid=True, group_best=2, **GROUPED)),
]


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize(("experts", "routing"), ROUTINGS)
def test_choice(experts: int, routing: Routing, corrected: bool, device: torch.device) -> None:
    logits = torch.randn(9, experts, device=device)
    correction = torch.randn(experts, device=device) if corrected else None
    weights, chosen = choose(logits, correction, routing)
    expected_weights, expected = choose_reference(logits, correction, routing)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("experts", [3, 16])
def test_weights_among_near_logits(experts: int, device: torch.device) -> None:
    routing = Routing(2, near=0.4, scale=1.5)
    logits = torch.randn(40, experts, device=device) + torch.linspace(-5, 5, 40, device=device)[:, None]
    weights, chosen = choose(logits, None, routing)
    expected_weights, expected = choose_reference(logits, None, routing)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights)
    alone = expected_weights == routing.scale
    assert alone.any()
    assert not alone.all()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_route(tokens: int, biased: bool, device: torch.device) -> None:
    """The logits are not rounded to the dtype of the weights."""
    x, weight = torch.randn(tokens, 96, device=device).half(), (torch.randn(24, 96, device=device) / 8).half()
    bias = torch.randn(24, device=device).half() if biased else None
    correction = torch.randn(24, device=device)
    scales = torch.rand(24, device=device) if biased else None
    routing = Routing(3, sigmoid=True, normalize=True, corrects_logits=biased, softcap=2.0 * biased)
    _, expected_weights, expected = route_reference(x.double(), weight, bias, correction, routing, scales)
    for config in (None, *routing_kernels.BY_TOKENS.values(), routing_kernels.FIXED):
        same, weights, chosen = route(x, weight, bias, correction, routing, scales, config)
        assert same is x
        assert torch.equal(chosen, expected)
        torch.testing.assert_close(weights.double(), expected_weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [3, 20])
def test_experts_of_others_have_no_number(tokens: int, device: torch.device) -> None:
    x, weight = torch.randn(tokens, 96, device=device), torch.randn(24, 96, device=device)
    scales = torch.rand(24, device=device)
    _, all_weights, every = route_reference(x, weight, None, None, Routing(4), scales)
    for own in (range(7), range(7, 24)):
        expected = [[expert - own.start if expert in own else NOT_OWN for expert in row] for row in every.tolist()]
        for function in (route_reference, route):
            _, weights, chosen = function(x, weight, None, None, Routing(4, own=own), scales)
            assert chosen.tolist() == expected
            torch.testing.assert_close(weights, all_weights)


def test_a_tokens_weights_do_not_depend_on_the_others(device: torch.device) -> None:
    x, weight = torch.randn(70, 96, device=device), torch.randn(24, 96, device=device)
    _, together, _ = route_fixed(x, weight, None, None, Routing(4))
    for token in (0, 69):
        assert torch.equal(route_fixed(x[token : token + 1], weight, None, None, Routing(4))[1][0], together[token])


def test_sigmoids_that_are_equal_do_not_decide(device: torch.device) -> None:
    logits = torch.tensor([[30.0, 31.0, 29.0], [-40.0, -41.0, -39.0]], device=device)
    for function in (choose, choose_reference):
        weights, chosen = function(logits, None, Routing(1, sigmoid=True))
        assert chosen.tolist() == [[1], [2]]
        torch.testing.assert_close(weights, logits.amax(dim=1, keepdim=True).sigmoid())


def test_equal_logits_choose_different_experts(device: torch.device) -> None:
    logits = torch.zeros(2, 6, device=device)
    weights, chosen = choose(logits, None, Routing(3, normalize=True))
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3, device=device))
    _, chosen = choose(logits, None, Routing(3, groups=3, used_groups=2))
    assert chosen.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("routing", [Routing(2, normalize=True), Routing(2, sigmoid=True, group_best=2, **GROUPED)])
def test_logits_that_are_not_finite_choose_experts_that_exist(routing: Routing, device: torch.device) -> None:
    logits = torch.zeros(5, 8, device=device)
    logits[0, 2], logits[1], logits[2, 0], logits[3] = float("nan"), float("-inf"), float("inf"), float("nan")
    weights, chosen = choose(logits, torch.zeros(8, device=device), routing)
    assert ((chosen >= 0) & (chosen < 8)).all()
    assert weights[4].isfinite().all()
    if not routing.sigmoid:
        assert weights[:4].isnan().any(dim=1).all()


THEIRS: dict[str, tuple[type, type, dict[str, Any], Routing]] = {
    "glm4_moe": (
        Glm4MoeTopkRouter,
        transformers.Glm4MoeConfig,
        {"n_routed_experts": 24, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        Routing(4, sigmoid=True, normalize=True, scale=2.5, group_best=2, **GROUPED),
    ),
    "deepseek_v2": (
        DeepseekV2TopkRouter,
        transformers.DeepseekV2Config,
        {
            "n_routed_experts": 24,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "topk_method": "group_limited_greedy",
        },
        Routing(4, scale=16.0, **GROUPED),
    ),
    "kolibri1": (
        Kolibri1TopKRouter,
        transformers.Kolibri1Config,
        {"num_experts": 24, "norm_topk_prob": True},
        Routing(4, sigmoid=True, normalize=True, corrects_logits=True),
    ),
    "gpt_oss": (GptOssTopKRouter, transformers.GptOssConfig, {"num_local_experts": 24}, Routing(4, normalize=True)),
    "laguna": (
        LagunaTopKRouter,
        transformers.LagunaConfig,
        {"num_experts": 24, "moe_router_logit_softcapping": 1.5},
        Routing(4, sigmoid=True, normalize=True, softcap=1.5),
    ),
    "phimoe": (
        PhimoeTopKRouter,
        transformers.PhimoeConfig,
        {"num_local_experts": 24, "router_jitter_noise": 0.1, "num_experts_per_tok": 2},
        Routing(2, near=0.2),
    ),
}


@pytest.mark.parametrize("family", THEIRS)
def test_the_reference_is_transformers_router(family: str) -> None:
    router_class, config_class, fields, routing = THEIRS[family]
    router = router_class(config_class(**{"hidden_size": 32, "num_experts_per_tok": 4, **fields})).eval()
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.normal_()
        x = torch.randn(40, 32)
        _, their_weights, theirs = router(x)
        bias = getattr(router, "bias", None)
        correction = getattr(router, "e_score_correction_bias", None)
        _, weights, chosen = route_reference(x, router.weight, bias, correction, routing)
    theirs, order = theirs.sort(dim=1)
    ours, our_order = chosen.long().sort(dim=1)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(weights.gather(1, our_order), their_weights.gather(1, order))
