"""The order of the work on a GPU's streams, tested without a GPU: which stream waits for which."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from baton_engine.pairs.copy_stream import CopyStream
from tests.engine.harness import make_request
from tests.engine.ledger import make_ledger_engine


class Device:
    """Streams and events in the place of torch.cuda's; notes behind what each piece of work comes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        device = self
        self.behind: dict[str, set[str]] = {}
        self.over: set[str] = set()

        class Stream:
            def __init__(self, _device: object = None) -> None:
                self.known: set[str] = set()

        class Event:
            def record(self) -> None:
                self.known = set(device.stream.known)

            def wait(self) -> None:
                device.stream.known |= self.known

            def query(self) -> bool:
                return self.known <= device.over

        @contextmanager
        def use(stream: Stream) -> Iterator[None]:
            before, device.stream = device.stream, stream
            yield
            device.stream = before

        self.stream = Stream()
        for name, value in {"Stream": Stream, "Event": Event, "stream": use}.items():
            patch.setattr(torch.cuda, name, value)

    def launch(self, work: str) -> None:
        self.behind[work] = set(self.stream.known)
        self.stream.known.add(work)

    def fence(self) -> object:
        event = torch.cuda.Event()
        event.record()
        return event


def test_what_arrives_waits_only_for_steps_that_may_write_to_its_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = Device(monkeypatch)
    engine = make_ledger_engine(
        tmp_path, 1, block_size=4, num_blocks=16, max_num_batched_tokens=8, max_num_seqs=4, max_model_len=32
    )
    monkeypatch.setattr(engine.runner, "fence", device.fence)
    monkeypatch.setattr(engine.runner.cache, "scatter", lambda *_: device.launch("scatter"))
    device.launch("a step of who had the blocks")
    engine.add(make_request(0, [1] * 8, 4, imports_kv=True))
    [reservation] = engine.reserve()
    device.launch("a step after that")

    scatters, freed = CopyStream(torch.device("cuda"), before_steps=True), []
    values = torch.zeros(1, 1, 8, 1, 1)
    extent = engine.runner.cache.layout.extent(0, 8)
    scatters.run(
        lambda: engine.import_kv(0, reservation.generation, extent, values) or None, lambda: freed.append("slot")
    )
    device.launch("the next step")
    assert device.behind["scatter"] == {"a step of who had the blocks"}
    assert "scatter" in device.behind["the next step"]

    device.over = {"a step of who had the blocks"}
    scatters.settle()
    assert not freed
    device.over.add("scatter")
    scatters.settle()
    assert freed == ["slot"]


def test_no_step_waits_for_what_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.launch("a step")
    CopyStream(torch.device("cuda")).run(lambda: device.launch("gather"), lambda: None)
    device.launch("the next step")
    assert device.behind == {"a step": set(), "gather": set(), "the next step": {"a step"}}
