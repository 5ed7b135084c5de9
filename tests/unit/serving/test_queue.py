"""Requests in a queue: batches of rows, answers in parts, failures, deadlines, lost clients."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dni_runtime.errors import RequestError, WorkerError
from dni_runtime.serving.engine import Answer
from dni_runtime.serving.protocol import Signature
from dni_runtime.serving.queue import Batch, Job, Queue, Rates
from dni_runtime.serving.settings import Settings
from tests.specs import float32, varying

ONE = Signature({"x": float32(1)}, {"y": float32(1)})


def rows(*values: float) -> tuple[Tensor]:
    return (torch.tensor(values, dtype=torch.float32).view(-1, 1),)


@dataclass
class Client:
    """What puts requests into a queue, and gets their answers."""

    queue: Queue
    done: list[Job] = field(default_factory=list)

    def put(self, *values: float, now: float = 0.0, whole: bool = False) -> Job:
        jobs: list[Job] = []
        job = self.queue.put(rows(*values), now, lambda: self.done.append(jobs[0]), whole=whole)
        jobs.append(job)
        return job

    def take(self, now: float = 0.0) -> list[float] | None:
        batch = self.queue.take(now)
        return None if batch is None else values_of(batch)

    def answer(self, batch: Batch | None, **fields: object) -> None:
        assert batch is not None
        fields.setdefault("outputs", (batch.inputs[0] * 2,))
        self.queue.answer(Answer(batch.id, **fields), 0.0)  # type: ignore[arg-type]


def values_of(batch: Batch) -> list[float]:
    return batch.inputs[0].flatten().tolist()


def outputs_of(job: Job) -> list[float]:
    assert job.error is None
    return job.outputs[0].flatten().tolist()


@pytest.fixture
def client() -> Client:
    return Client(Queue(ONE, Settings(max_batch=4, max_waiting=10, deadline_s=5)))


def test_rows_are_counted_not_requests(client: Client) -> None:
    first, large, last = client.put(1, 2, 3), client.put(4, 5, 6, 7, 8), client.put(9)
    batches = [client.queue.take(0.0) for _ in range(3)]
    assert [values_of(batch) for batch in batches if batch] == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert client.take() is None
    for batch in reversed(batches):
        client.answer(batch)
    assert client.done == [last, first, large]
    assert [outputs_of(job) for job in (first, large, last)] == [
        [2, 4, 6],
        [8, 10, 12, 14, 16],
        [18],
    ]
    assert len(client.queue) == client.queue.waiting == 0


def test_requests_of_one_length_make_a_batch() -> None:
    texts = Signature({"x": varying(float32(8))}, {"y": varying(float32(8))})
    queue = Queue(texts, Settings(max_batch=3, max_waiting=12, deadline_s=5))
    lengths = (2, 5, 2, 5, 3, 2)
    jobs = [queue.put((torch.full((2, n), float(n)),), 0.0, lambda: None) for n in lengths]
    taken = []
    while (batch := queue.take(0.0)) is not None:
        taken.append([*batch.inputs[0].shape])
        queue.answer(Answer(batch.id, outputs=(batch.inputs[0] * 2,)), 0.0)
    assert taken == [[3, 2], [3, 5], [3, 2], [1, 5], [2, 3]], "the first one that waits goes first"
    for job, length in zip(jobs, lengths, strict=True):
        assert job.error is None
        assert torch.equal(job.outputs[0], torch.full((2, length), 2.0 * length))
    assert (len(queue), queue.waiting) == (0, 0)


def test_a_batch_ends_with_its_last_row(client: Client) -> None:
    """Whoever answers it, also twice; its requests may have rows in other batches."""
    job = client.put(1, 2, 3, 4, 5)
    batch = client.queue.take(0.0)
    assert batch is not None
    (x,) = batch.inputs
    for rows, left in (([0, 1], {2, 3}), ([1, 2], {3}), ([3], set[int]())):
        answer = Answer(batch.id, torch.tensor(rows), (x[rows] * 2,), exit="low")
        assert client.queue.answer(answer, 2.0) is batch
        assert batch.open == left
    assert client.queue.answer(answer, 3.0) is None
    client.answer(client.queue.take(0.0))
    assert outputs_of(job) == [2, 4, 6, 8, 10]


def test_a_batch_may_wait_for_more_rows() -> None:
    client = Client(Queue(ONE, Settings(max_batch=4, max_waiting=10, deadline_s=5, batch_wait_s=1)))
    client.put(1, now=0.0)
    assert client.take(0.5) is None
    assert client.queue.next_at(room=True) == 1.0
    assert client.queue.next_at(room=False) == 5.0
    client.put(2, now=0.6)
    assert client.take(1.0) == [1, 2]
    client.put(3, 4, 5, 6, now=1.1)
    assert client.take(1.1) == [3, 4, 5, 6]


def test_too_many_rows_wait(client: Client) -> None:
    client.put(*range(8))
    with pytest.raises(RequestError, match="8 rows wait") as caught:
        client.put(1, 2, 3)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    with pytest.raises(RequestError, match="several requests") as caught:
        client.put(*range(11))
    assert caught.value.status == 413
    client.take()
    client.put(1, 2, 3)
    assert client.queue.waiting == 7


def test_a_client_leaves(client: Client) -> None:
    gone, stays = client.put(1, 2, 3, 4, 5, 6), client.put(7)
    sent = client.queue.take(0.0)
    client.queue.leave(gone)
    assert client.queue.waiting == 1
    assert client.take() == [7]  # its other rows are not computed
    client.answer(sent)
    client.queue.leave(gone)
    assert client.done == []
    assert not stays.over


def test_deadlines(client: Client) -> None:
    first, second = client.put(1, now=0.0), client.put(2, now=1.0)
    assert client.take(1.0) == [1, 2]
    third = client.put(3, now=2.0)
    client.queue.expire(4.9)
    assert client.done == []
    client.queue.expire(7.0)
    assert client.done == [first, second, third]
    texts = [str(job.error) for job in client.done]
    assert "is being computed" in texts[0]
    assert "its rows wait" in texts[2]
    assert isinstance(first.error, RequestError)
    assert first.error.status == 504
    assert client.take(7.0) is None
    assert client.queue.next_at(room=True) is None


def test_a_request_that_fails_fails_alone(client: Client) -> None:
    good, bad, last = client.put(1), client.put(2, 3), client.put(4)
    client.answer(client.queue.take(0.0), error=ValueError("no"))
    assert client.done == []
    new = client.put(5)
    for expected, error in (([1], None), ([2, 3], ValueError("bad")), ([4], None), ([5], None)):
        batch = client.queue.take(0.0)
        assert batch is not None
        assert values_of(batch) == expected
        client.answer(batch, error=error)
    assert client.done == [good, bad, last, new]
    assert str(bad.error) == "bad"
    assert [outputs_of(job) for job in (good, last, new)] == [[2], [8], [10]]


def test_who_makes_a_large_batch_fail_is_found_in_few_batches() -> None:
    client = Client(Queue(ONE, Settings(max_batch=64, max_waiting=64)))
    jobs = [client.put(value) for value in range(64)]
    batches = 0
    while (batch := client.queue.take(0.0)) is not None:
        batches += 1
        client.answer(batch, error=ValueError("bad") if 37 in values_of(batch) else None)
    assert [job for job in jobs if job.error is not None] == [jobs[37]]
    assert [outputs_of(job) for job in jobs[38:]] == [[2 * value] for value in range(38, 64)]
    assert batches == 1 + 8 + 4 + 2


def test_some_rows_leave_at_an_exit(client: Client) -> None:
    first, second = client.put(1, 2), client.put(3)
    batch = client.queue.take(0.0)
    client.answer(batch, rows=torch.tensor([2, 0]), outputs=rows(30, 10), exit="low")
    assert client.done == [second]
    assert second.exits == ["low"]
    # The first answer of a row counts.
    client.answer(batch, rows=torch.tensor([0, 1]), outputs=rows(11, 21), degraded=True)
    assert (outputs_of(first), outputs_of(second)) == ([10, 21], [30])
    assert (first.exits, first.degraded, second.degraded) == (["low", None], True, False)


def test_a_batch_that_fails_after_some_rows_have_left(client: Client) -> None:
    first, second = client.put(1, 2), client.put(3)
    batch = client.queue.take(0.0)
    client.answer(batch, rows=torch.tensor([0]), outputs=rows(10), exit="low")
    client.answer(batch, error=ValueError("no"))
    for _ in range(2):
        client.answer(client.queue.take(0.0))
    assert (outputs_of(first), outputs_of(second)) == ([10, 4], [6])


def test_probes_go_first_and_alone(client: Client) -> None:
    client.put(1)
    probe = client.put(0, whole=True)
    batch = client.queue.take(0.0)
    assert batch is not None
    assert (values_of(batch), batch.whole) == ([0], True)
    client.answer(batch)
    assert client.done == [probe]
    assert client.take() == [1]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"outputs": rows(1)}, "instead of"),
        ({"outputs": ()}, "instead of"),
        ({"outputs": (torch.zeros(2, 1, dtype=torch.float64),)}, "float64"),
        ({"rows": torch.tensor([0, 0]), "outputs": rows(1, 1)}, "rows [0, 0]"),
        ({"rows": torch.tensor([2]), "outputs": rows(1)}, "rows [2] of a batch of 2"),
        ({"rows": torch.tensor([-1]), "outputs": rows(1)}, "rows [-1]"),
    ],
)
def test_answers_that_do_not_fit(fields: dict[str, object], text: str, client: Client) -> None:
    job = client.put(1, 2)
    client.answer(client.queue.take(0.0), **fields)
    assert client.done == [job]
    assert isinstance(job.error, WorkerError)
    assert text in str(job.error)


def test_answers_that_nobody_waits_for(client: Client) -> None:
    job = client.put(1)
    batch = client.queue.take(0.0)
    assert batch is not None
    assert client.queue.answer(Answer(batch.id + 1, outputs=rows(9)), 0.0) is None
    assert client.queue.answer(Answer(batch.id, rows=torch.tensor([], dtype=torch.int64)), 0.0)
    assert not job.over
    client.answer(batch)
    assert client.queue.answer(Answer(batch.id, outputs=rows(9)), 0.0) is None
    assert outputs_of(job) == [2]


ACTION = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 9), st.booleans()),
    st.tuples(st.just("take"), st.just(0), st.just(False)),
    st.tuples(st.just("answer"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("part"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("leave"), st.integers(0, 9), st.just(False)),
    st.tuples(st.just("time"), st.integers(0, 3), st.just(False)),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(ACTION, max_size=60), st.randoms(use_true_random=False))
def test_each_row_is_answered_once_and_none_is_lost(actions, random) -> None:  # type: ignore[no-untyped-def]
    """Whatever happens, a request gets the answers of its rows in order, or its own failure."""
    client = Client(Queue(ONE, Settings(max_batch=4, max_waiting=40, deadline_s=20)))
    queue, now, value = client.queue, 0.0, 0.0
    jobs: dict[Job, tuple[list[float], bool]] = {}
    sent: list[Batch] = []
    left: set[Job] = set()

    def reply(batch: Batch, part: bool, twice: bool) -> None:
        values = batch.inputs[0]
        if bool((values < 0).any()):
            client.answer(batch, error=ValueError("poison"))
        elif part:
            chosen = torch.tensor(random.sample(range(batch.rows), random.randint(0, batch.rows)))
            for _ in range(1 + twice):
                client.answer(
                    batch, rows=chosen.long(), outputs=(values[chosen.long()] * 2,), exit="e"
                )
        else:
            client.answer(batch)

    for action, number, flag in actions:
        if action == "put":
            poisoned = flag and number % 3 == 0
            values = [value + n for n in range(1, number + 1)]
            value += number
            values[0] *= -1 if poisoned else 1
            if queue.waiting + number > 40:
                with pytest.raises(RequestError, match="rows wait"):
                    client.put(*values, now=now)
            else:
                jobs[client.put(*values, now=now)] = (values, poisoned)
        elif action == "take" and (batch := queue.take(now)):
            assert batch.rows <= 4
            sent.append(batch)
        elif action in ("answer", "part") and sent:
            batch = sent[number % len(sent)]
            if action == "answer":
                sent.remove(batch)
            reply(batch, action == "part", flag)
        elif action == "leave" and jobs:
            job = list(jobs)[number % len(jobs)]
            if not job.over:
                left.add(job)
            queue.leave(job)
        elif action == "time":
            now += number
            queue.expire(now)
        open_jobs = [job for job in jobs if not job.over]
        assert len(queue) == len(open_jobs)
        assert queue.waiting == sum(job.rows - job.taken for job in open_jobs)

    while sent or queue.waiting or len(queue):
        sent += iter(lambda: queue.take(now), None)
        for batch in sent:
            reply(batch, False, False)
        sent.clear()
    assert not queue._sent
    assert not queue._apart
    assert len(client.done) == len(set(client.done)) == len(jobs) - len(left)
    for job in client.done:
        values, poisoned = jobs[job]
        if isinstance(job.error, RequestError):
            assert job.error.status == 504
        elif job.error is not None:
            assert poisoned
        else:
            assert not poisoned
            assert outputs_of(job) == [2 * number for number in values]


def refused_for(rates: Rates, client: str, now: float) -> int | None:
    try:
        rates.admit(client, now)
    except RequestError as error:
        return error.retry_after_s
    return None


def test_a_client_may_send_so_many_requests_a_second() -> None:
    rates = Rates(4)
    assert [refused_for(rates, "a", 10.0) for _ in range(6)] == [None] * 4 + [1, 1]
    assert refused_for(rates, "b", 10.0) is None, "another client"
    assert refused_for(rates, "a", 10.25) is None, "refused ones do not count"
    assert refused_for(rates, "a", 10.26) == 1
    assert [refused_for(rates, "a", 12.0) for _ in range(5)] == [None] * 4 + [1]


def test_a_rate_may_be_below_one_and_clients_are_forgotten() -> None:
    rates = Rates(0.1)
    assert refused_for(rates, "a", 0.0) is None
    assert refused_for(rates, "a", 4.5) == 6
    assert refused_for(rates, "a", 10.0) is None
    for n in range(1000):
        rates.admit(str(n), 100.0 + 20 * n)
    assert len(rates._due) == 1
