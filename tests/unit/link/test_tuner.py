"""The window that is found by measuring, against a simulated line and a neighbour that computes."""

from __future__ import annotations

import heapq
import random

import pytest

from dni_runtime.link.tuner import PROBE_EVERY_S, WindowTuner

LIMIT = 64


class Line:
    """A sender that computes, a line, and a receiver that computes and acknowledges."""

    def __init__(self, own_s: float, delay_s: float, other_s: float, noise: float = 0.0) -> None:
        self.tuner = WindowTuner(LIMIT)
        self.own_s, self.delay_s, self.other_s, self.noise = own_s, delay_s, other_s, noise
        self.now_s = 0.0
        self.id = self.acked = 0
        self.free_s = 0.0
        self.events: list[tuple[float, int]] = []
        self.random = random.Random(0)

    def took(self, seconds: float) -> float:
        return seconds * (1 + self.noise * self.random.random())

    def run(self, seconds: float) -> tuple[float, float]:
        """Messages a second, and the mean number under way."""
        end_s, began, first, area = self.now_s + seconds, self.now_s, self.acked, 0.0
        ready_s = self.now_s
        while self.now_s < end_s:
            while self.events and self.events[0][0] <= self.now_s:
                at_s, id = heapq.heappop(self.events)
                self.acked = max(self.acked, id)
                self.tuner.acknowledged(id, at_s)
            before = self.now_s
            if self.id - self.acked < self.tuner.size and ready_s <= self.now_s:
                self.id += 1
                self.tuner.sent(self.id, self.now_s, self.id - self.acked)
                arrives = self.now_s + self.delay_s
                self.free_s = max(self.free_s, arrives) + self.took(self.other_s)
                heapq.heappush(self.events, (self.free_s + self.delay_s, self.id))
                ready_s = self.now_s + self.took(self.own_s)
                continue
            full = self.id - self.acked >= self.tuner.size
            following = [self.events[0][0]] if self.events else []
            if not full:
                following.append(ready_s)
            self.now_s = min(following)
            area += (self.now_s - before) * (self.id - self.acked)
        return (self.acked - first) / (self.now_s - began), area / (self.now_s - began)


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.05, 0.2])
@pytest.mark.parametrize(("own_s", "other_s"), [(0.01, 0.02), (0.02, 0.01), (0.02, 0.02)])
def test_the_line_is_filled_and_no_more(
    own_s: float, other_s: float, delay_s: float, noise: float
) -> None:
    line = Line(own_s, delay_s, other_s, noise)
    line.run(20)
    rate, in_flight = line.run(60)
    fastest = 1 / (max(own_s, other_s) * (1 + noise / 2))
    assert rate > 0.9 * fastest
    needed = (2 * delay_s + other_s * (1 + noise / 2)) * fastest
    assert in_flight < needed + 4
    assert line.tuner.size <= 2 * needed + 5


def test_a_line_that_becomes_longer_is_filled_again() -> None:
    line = Line(0.01, 0.001, 0.02)
    line.run(20)
    assert line.tuner.size <= 5
    line.delay_s = 0.1
    line.run(2 * PROBE_EVERY_S)
    rate, _ = line.run(60)
    assert rate > 0.85 / 0.02
    line.delay_s = 0.001
    line.run(3 * PROBE_EVERY_S)
    assert line.tuner.size <= 5


def test_the_limit_holds() -> None:
    line = Line(0.001, 1.0, 0.001)
    line.run(60)
    assert line.tuner.size == LIMIT
