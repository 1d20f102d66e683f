"""One trace of a request through gateway, decode and prefill pod, as a collector gets it."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from .prompts import make_prompt
from .stack import Stack

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


class Collector(rpc.TraceServiceServicer):
    """Takes spans over OTLP."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []  # each with its service's name

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            self.spans += [(names["service.name"], span) for scope in resource.scope_spans for span in scope.spans]
        return collector.ExportTraceServiceResponse()

    async def until(self, count: int, trace: str) -> dict[tuple[str, str], Span]:
        """Wait for so many spans of a trace; return them by service and name."""
        async with asyncio.timeout(20):
            while True:
                found = [(service, span) for service, span in self.spans if span.trace_id.hex() == trace]
                if len(found) >= count:
                    return {(service.removeprefix("baton-"), span.name): span for service, span in found}
                await asyncio.sleep(0.1)


@pytest.fixture
def receiver() -> Iterator[tuple[Collector, str]]:
    receiver, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    rpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield receiver, f"http://127.0.0.1:{port}"
    server.stop(None)


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def attributes(span: Span) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


async def first_byte_s(stack: Stack, **headers: str) -> float:
    """Ask for a stream; return when its first token came."""
    began = time.monotonic()
    body = {"model": stack.model, "prompt": make_prompt(900, seed=1), "max_tokens": 5, "stream": True, "temperature": 0}
    async with stack.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        first = None
        async for _ in response.aiter_lines():
            first = first or time.monotonic() - began
    assert first is not None
    return first


async def test_a_trace_has_all_parts(receiver: tuple[Collector, str], llama, monkeypatch) -> None:
    taken, endpoint = receiver
    monkeypatch.setenv("BATON_OTLP_ENDPOINT", endpoint)
    stack = await Stack.start(llama, "--max-num-batched-tokens", "4", "--no-enable-prefix-caching")
    try:
        await first_byte_s(stack, traceparent=f"00-{'0' * 31}1-{PARENT}-00")  # whose caller does not trace it
        ttft = await first_byte_s(stack, traceparent=f"00-{TRACE}-{PARENT}-01")
        spans = await taken.until(12, TRACE)
    finally:
        await stack.stop()
    assert {span.trace_id.hex() for _, span in taken.spans} == {TRACE}
    whole = spans["gateway", f"text_completion {stack.model}"]
    assert whole.parent_span_id.hex() == PARENT
    told = attributes(whole)
    assert (told["gen_ai.operation.name"], told["gen_ai.request.model"]) == ("text_completion", stack.model)
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (900, 5)
    decode, prefill = spans["decode", "decode"], spans["prefill", "prefill"]
    assert decode.parent_span_id == whole.span_id
    assert prefill.parent_span_id == decode.span_id
    for parent, service, names in (
        (whole, "gateway", ("prepare", "queue", "first token", "stream")),
        (decode, "decode", ("reserve", "prefill elsewhere", "handover")),
        (prefill, "prefill", ("prefill queue", "prefill compute", "export")),
    ):
        parts = [spans[service, name] for name in names]
        assert {part.parent_span_id for part in parts} == {parent.span_id}
        # One after the other, within the whole.
        times = [time for part in parts for time in (part.start_time_unix_nano, part.end_time_unix_nano)]
        assert times == sorted(times)
        slack = 2_000_000  # clocks of processes are read one after the other
        assert parent.start_time_unix_nano - slack <= times[0]
        assert times[-1] <= parent.end_time_unix_nano + slack
    # What the client waited for is all there, and was spent where the parts say.
    waited = sum(seconds(spans["gateway", name]) for name in ("prepare", "queue", "first token"))
    assert abs(waited - ttft) < 0.05 * ttft
    below = seconds(spans["decode", "reserve"]) + seconds(spans["decode", "prefill elsewhere"])
    assert abs(below - seconds(spans["gateway", "first token"])) < 0.1 * ttft
    worked = seconds(spans["prefill", "prefill queue"]) + seconds(spans["prefill", "prefill compute"])
    assert abs(worked - seconds(spans["decode", "prefill elsewhere"])) < 0.1 * ttft
    assert not [name for name in told if "content" in name or "prompt" in name]


async def test_without_a_collector_requests_are_answered(llama, monkeypatch) -> None:
    monkeypatch.setenv("BATON_OTLP_ENDPOINT", "http://127.0.0.1:9")
    stack = await Stack.start(llama)
    try:
        answer = await stack.complete("hello", max_tokens=2)
        assert answer.status_code == httpx.codes.OK
    finally:
        await stack.stop()
