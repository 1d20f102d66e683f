"""Groups of layers that are handed over while later layers are computed."""

from dataclasses import dataclass, field

import pytest
import torch

from baton_engine.layer_marks import LayerMarks


@dataclass
class Device:
    """layers: how many it has computed. events: by the number of layers before each, in the order of launches."""

    layers: int = 0
    launched: int = 0
    events: list["Event"] = field(default_factory=list)


class Event:
    device: Device

    def record(self) -> None:
        self.behind = self.device.launched
        self.device.events.append(self)

    def query(self) -> bool:
        return self.device.layers >= self.behind


@pytest.mark.parametrize(
    ("num_layers", "groups", "ahead", "reports"),
    [
        (8, 2, 2, {1: 0, 2: 4, 5: 4, 6: 8}),
        (8, 2, 0, {3: 0, 4: 4, 7: 4, 8: 8}),
        (3, 3, 2, {0: 0, 1: 3}),  # a group is reported after one layer at the earliest
        (7, 1, 2, {4: 0, 5: 7, 7: 7}),
    ],
)
def test_a_group_is_reported_ahead_of_its_end_with_the_event_behind_it(
    num_layers: int, groups: int, ahead: int, reports: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Event.device = Device()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    marks = LayerMarks(num_layers, groups, ahead)
    for layer in range(num_layers):
        device.launched = layer + 1
        marks.written(layer)
        marks.written(layer)  # by a later layer that has no KV of its own
    assert len({event.behind for event in device.events}) == len(device.events)
    for computed, end in reports.items():
        device.layers = computed
        layers, event = marks.ready()
        assert layers == end
        assert event is None if end == 0 else isinstance(event, Event) and event.behind == end
        if end:
            assert marks.behind(end) is event
