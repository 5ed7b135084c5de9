"""When a run has stalled: situations of a chain of three, one report of each module a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from dni_runtime.run.documents.reports import Report
from dni_runtime.supervise.stall import GAP_S, PATIENT, SLOW, Stall, StallRule

NAMES = ("bottom", "middle", "top")
STALL_S = 60.0
BEGIN_S = 100
"""Until then all train, a batch a second."""

Reports = dict[str, dict[str, Any]]
Situation = Callable[[int], Reports]


def report(id: int, doing: str, **more: Any) -> dict[str, Any]:
    return {"attempt": 1, "state": "running", "id": id, "doing": doing, "doing_s": 0.3} | more


def read(reports: Mapping[str, dict[str, Any]]) -> dict[str, Report]:
    return {name: Report(**one) for name, one in reports.items()}


def still(**modules: tuple[int, str]) -> Situation:
    """From the beginning on all stay where they are, each at an id and doing something."""
    return lambda s: {
        name: report(*there, doing_s=float(s - BEGIN_S)) for name, there in modules.items()
    }


def trains(s: int) -> Reports:
    return {name: report(s, "batch") for name in NAMES}


def first(
    situation: Situation,
    *,
    until_s: int = 1000,
    clock: Callable[[int], float] = float,
    finished: tuple[str, ...] = (),
) -> tuple[int, Stall] | None:
    """The first stall of a chain that trains before, and after how many seconds it is seen."""
    rule = StallRule(NAMES, STALL_S)
    for s in range(until_s):
        reports = trains(s) if s < BEGIN_S else situation(s)
        # A report changes as long as its worker lives; what its clock says plays no part.
        shown = {
            n: one | {"time": s} if one and not one.get("silent") else one
            for n, one in reports.items()
        }
        gone = finished if s >= BEGIN_S else ()
        if found := rule.look(clock(s), read(shown), gone):
            return s - BEGIN_S, found[0]
    return None


LOST_BATCH = still(bottom=(104, "window"), middle=(100, "input"), top=(100, "input"))
LOST_GRADIENT = still(bottom=(101, "gradient"), middle=(101, "gradient"), top=(101, "input"))
HUNG = still(bottom=(116, "window"), middle=(108, "window"), top=(100, "batch"))
NOT_ENDED = {"bottom": report(200, "checkpoint", state="finished")}


@pytest.mark.parametrize("situation", [LOST_BATCH, LOST_GRADIENT])
def test_nothing_is_lost_while_one_that_saves_cannot_send(situation: Situation) -> None:
    """A slow disk: its own time for a checkpoint is longer, and the others may wait for it."""
    saves = {"top": report(100, "checkpoint", doing_s=0.0, saving=1)}
    assert first(lambda s: situation(s) | saves, until_s=BEGIN_S + int(2 * STALL_S)) is None


def silent(name: str, situation: Situation) -> Situation:
    """The same with a worker that does not report any more."""
    return lambda s: situation(s) | {name: situation(BEGIN_S)[name] | {"silent": True}}


def goes_past(s: int) -> Reports:
    """``on_loss: continue`` above a link that nothing comes through."""
    return still(middle=(100, "input"), top=(100, "input"))(s) | {"bottom": report(s, "batch")}


@pytest.mark.parametrize(
    ("situation", "modules", "after_s", "words"),
    [
        pytest.param(LOST_BATCH, ("middle", "bottom"), STALL_S, "'bottom' waits for room", id="h"),
        pytest.param(LOST_GRADIENT, ("top", "middle"), STALL_S, "waits for gradients", id="g"),
        pytest.param(HUNG, ("top",), STALL_S, "busy with one batch", id="one batch"),
        pytest.param(
            silent("top", still(bottom=(116, "window"), middle=(108, "window"), top=(9, "input"))),
            ("top",), STALL_S, "not reported", id="a stopped process",
        ),
        pytest.param(
            silent("bottom", still(bottom=(9, "data"), middle=(100, "input"), top=(100, "input"))),
            ("bottom",), STALL_S, "not reported", id="a stopped head that reads data",
        ),
        pytest.param(goes_past, ("middle", "bottom"), STALL_S, "link is down", id="gone past"),
        pytest.param(
            still(bottom=(116, "window"), middle=(108, "checkpoint"), top=(108, "input")),
            ("middle",), PATIENT * STALL_S, "no progress with its", id="a checkpoint",
        ),
        pytest.param(
            lambda s: {**still(bottom=(108, "window"), top=(100, "input"))(s), "middle": {}},
            ("middle",), PATIENT * STALL_S, "has been starting", id="a start",
        ),
        pytest.param(
            lambda s: NOT_ENDED, ("bottom",), PATIENT * STALL_S, "has not exited", id="its end",
        ),
    ],
)  # fmt: skip
def test_what_has_stalled_is_named(
    situation: Situation, modules: tuple[str, ...], after_s: float, words: str
) -> None:
    found = first(situation)
    assert found is not None
    seen_s, stall = found
    assert stall.modules == modules
    assert after_s <= seen_s <= after_s + 2
    assert words in stall.message


def test_whoever_waits_for_one_that_has_finished_has_stalled() -> None:
    found = first(still(middle=(100, "input"), top=(100, "input")), finished=("bottom",))
    assert found is not None
    assert found[1].modules == ("middle",)
    assert "which has finished" in found[1].message


def test_progress_with_a_checkpoint_is_what_reaches_the_disk() -> None:
    """However long it takes: neither a stall, nor a reason to kill its worker."""

    def seen(every_s: int, *, silent_s: int = 10_000) -> tuple[int, int]:
        """When it is said to have stalled, and to save nothing any more."""
        rule, stalled_s = StallRule(NAMES, STALL_S), 0
        for s in range(10_000):
            waits = {"bottom": report(108, "window", time=s), "top": report(108, "input", time=s)}
            saves = report(108, "checkpoint", saving=s // every_s, time=min(s, silent_s))
            found = rule.look(float(s), read(waits | {"middle": saves}))
            stalled_s = stalled_s or (s if found else 0)
            if not rule.saves("middle"):
                return stalled_s, s
        return stalled_s, 0

    limit_s = int(PATIENT * STALL_S)
    assert seen(limit_s - 1) == (0, 0)
    assert seen(limit_s + 100) == (limit_s, limit_s)
    assert seen(1, silent_s=0) == (0, 0)  # its bytes show that it lives
    assert seen(10_000, silent_s=50)[1] == 50 + int(STALL_S)


def test_who_saves_nothing_is_not_said_to() -> None:
    rule = StallRule(NAMES, STALL_S)
    reports = read({name: report(108, "window") for name in NAMES})
    for s in range(5):
        rule.look(float(s), reports)
        assert not any(map(rule.saves, (*NAMES, "unknown")))
    beside = read({"top": report(108, "batch", saving=0)})  # its thread writes, and it trains
    rule.look(5.0, reports | beside)
    assert rule.saves("top")


@pytest.mark.parametrize("doing", ["window", "input"])
def test_who_waits_for_one_that_works_does_not_wait_for_one_that_has_finished(doing: str) -> None:
    """At the end: one of two neighbours still writes its last checkpoint, the other is gone."""
    names = ("head", "left", "right", "tail")
    sources = {"left": ("head",), "right": ("head",), "tail": ("left", "right")}
    waits = "head" if doing == "window" else "tail"

    def seen(*there: str) -> list[Stall]:
        rule, found = StallRule(names, STALL_S, sources), list[Stall]()
        for s in range(300):
            reports = {name: report(9, "checkpoint", time=s, saving=s) for name in there}
            reports[waits] = report(9, doing, time=s)
            found += rule.look(float(s), read(reports), [n for n in names if n not in reports])
        return found

    assert not seen("right")
    assert "which has finished" in seen()[0].message


def test_who_waits_for_several_that_finish_waits_for_the_last_one() -> None:
    """The first one has finished long ago when the last one has: who waits may just go on."""
    names, last_s, found = ("head", "left", "right"), 200, list[int]()
    rule = StallRule(names, STALL_S, {"left": ("head",), "right": ("head",)})
    for s in range(400):
        reports = {"head": report(9, "window", time=s)}
        if s < last_s:
            reports["right"] = report(9, "checkpoint", time=s, saving=s)
        if rule.look(float(s), read(reports), [n for n in names if n not in reports]):
            found.append(s)
    assert found[0] >= last_s + STALL_S


def test_time_with_a_checkpoint_is_no_time_of_waiting() -> None:
    """Its upstream has finished long ago when it comes to wait for it, for a moment."""
    rule = StallRule(NAMES, STALL_S)
    for s in range(400):
        doing = (
            report(9, "checkpoint", time=s, saving=0) if s < 300 else report(9, "window", time=s)
        )
        found = rule.look(float(s), read({"middle": doing}), ("bottom", "top"))
        assert bool(found) == (s >= 300 + STALL_S)


@pytest.mark.parametrize("phase", ["running", "starting", "connecting"])
def test_who_has_waited_for_a_slow_disk_waits_anew_when_it_has_written(phase: str) -> None:
    """The head writes, or starts again, for long; what it then sends is still on its way."""
    rule, found = StallRule(NAMES, STALL_S), list[int]()
    for s in range(400):
        slow = 10 <= s < 300
        doing = "checkpoint" if slow and phase == "running" else "window"
        head = report(9 if s > 5 else s, doing, time=s, saving=s if doing == "checkpoint" else None)
        head |= {"state": phase} if slow else {}
        waiting = {name: report(4, "input", time=s) for name in NAMES[1:]}
        if rule.look(float(s), read({"bottom": head, **waiting})):
            found.append(s)
    assert 300 + STALL_S - 15 < found[0] < 300 + STALL_S


def slow(every_s: int) -> Situation:
    """The tail takes so long for a batch; the others wait for it."""

    def situation(s: int) -> Reports:
        id, doing_s = BEGIN_S + (s - BEGIN_S) // every_s, (s - BEGIN_S) % every_s
        waits = {name: report(id + 4, "window") for name in NAMES[:-1]}
        return {**waits, "top": report(id, "batch", doing_s=float(doing_s))}

    return situation


def slower_and_slower(s: int) -> Reports:
    return slow(40)(s) if s < 300 else slow(SLOW * 39)(s)


def first_batch(s: int) -> Reports:
    """After a restart: the first batch compiles kernels."""
    reports = still(bottom=(108, "window"), middle=(100, "input"), top=(100, "input"))(s)
    away = {"middle": report(100, "batch", attempt=2)} if s > BEGIN_S + 30 else {}
    return {**reports, "middle": {}} if not away else {**reports, **away}


@pytest.mark.parametrize(
    "situation",
    [
        pytest.param(
            still(bottom=(100, "data"), middle=(100, "input"), top=(100, "input")), id="slow data"
        ),
        pytest.param(slow(55), id="slow batches"),
        pytest.param(slower_and_slower, id="batches that become slower"),
        pytest.param(
            still(bottom=(108, "window"), top=(100, "input")), id="a module that is restarted"
        ),
        pytest.param(lambda s: {}, id="none runs"),
        pytest.param(first_batch, id="a first batch"),
        pytest.param(
            lambda s: {
                **still(bottom=(108, "window"), top=(100, "input"))(s),
                "middle": report(100, "start", attempt=2, state="starting"),
            },
            id="a start",
        ),
        pytest.param(
            lambda s: {
                **still(bottom=(108, "window"), top=(100, "input"))(s),
                "middle": report(100, "input", attempt=2, state="connecting"),
            },
            id="connecting",
        ),
        pytest.param(
            still(bottom=(108, "window"), middle=(108, "checkpoint"), top=(108, "input")),
            id="a checkpoint",
        ),
        pytest.param(
            still(bottom=(108, "window"), middle=(108, "window"), top=(100, "evaluation")),
            id="an evaluation's end",
        ),
        pytest.param(
            lambda s: {n: report(100, "batch", state="stopping") for n in NAMES}, id="stopping"
        ),
        pytest.param(
            lambda s: {
                "bottom": report(200, "window"),
                "middle": report(200, "checkpoint"),
                "top": report(200, "checkpoint", state="finished"),
            },
            id="the end",
        ),
    ],
)
def test_what_is_explained_has_not_stalled(situation: Situation) -> None:
    assert first(situation, until_s=BEGIN_S + int(PATIENT * STALL_S) - 5) is None


def test_modules_that_follow_a_slow_source_have_not_stalled() -> None:
    def situation(s: int) -> Reports:
        """A batch every 90 s; the others have had all that was sent."""
        id = BEGIN_S + (s - BEGIN_S) // 90
        return {"bottom": report(id, "data"), "middle": report(id, "input"),
                "top": report(id, "input")}  # fmt: skip

    assert first(situation) is None


def test_slow_data_does_not_make_a_limit_longer() -> None:
    def situation(s: int) -> Reports:
        """A batch every 50 s, and one that does not come to its end."""
        hung = s >= BEGIN_S + 200
        id = BEGIN_S + (min(s, BEGIN_S + 200) - BEGIN_S) // 50
        doing = ("batch", s - BEGIN_S - 200) if hung else ("data", s % 50)
        head = report(id, doing[0], doing_s=float(doing[1]))
        return still(middle=(id, "input"), top=(id, "input"))(s) | {"bottom": head}

    found = first(situation)
    assert found is not None
    assert 200 + STALL_S <= found[0] <= 200 + STALL_S + 2


def test_a_batch_after_a_long_wait_has_only_begun() -> None:
    """Its neighbour was restarted meanwhile, and sends again: the reports of both come late."""

    def situation(s: int) -> Reports:
        waited = s < BEGIN_S + STALL_S + 5
        top = report(100, "input" if waited else "batch", doing_s=s - BEGIN_S if waited else 0.1)
        return {"top": top} if waited else {"middle": report(100, "batch"), "top": top}

    assert first(situation, until_s=int(BEGIN_S + STALL_S + 6)) is None


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """The reader was stopped, or its host was suspended, and the workers with it."""

    def situation(s: int) -> Reports:
        return silent("top", HUNG)(s) if s < BEGIN_S + 5 else trains(s)

    def clock(s: int) -> float:
        return s + (100_000.0 if s >= BEGIN_S + 5 else 0.0)

    assert first(situation, clock=clock, until_s=500) is None
    asleep = first(HUNG, clock=lambda s: s * 1000.0)
    assert asleep is not None
    assert asleep[0] == STALL_S / GAP_S


def test_ends_of_the_chain_have_no_neighbour_to_wait_for() -> None:
    assert first(still(bottom=(100, "input"), middle=(100, "input"), top=(100, "window"))) is None


def test_both_ends_tell_of_one_stall() -> None:
    rule = StallRule(NAMES, STALL_S)
    found: list[Stall] = []
    for s in range(300):
        reports: Mapping[str, dict[str, Any]] = trains(s) if s < BEGIN_S else LOST_GRADIENT(s)
        found = rule.look(float(s), read({n: one | {"time": s} for n, one in reports.items()}))
    assert [stall.modules for stall in found] == [("top", "middle")]
    assert rule.moves(NAMES) > 3 * (BEGIN_S - 3)
    assert rule.still_s("top") == pytest.approx(300 - BEGIN_S, abs=2)


@pytest.mark.parametrize("late", ["left", "right"])
def test_a_join_waits_for_the_input_that_has_not_come(late: str) -> None:
    """The other one has sent more, and waits for room itself."""
    sources = {"left": ("head",), "right": ("head",), "join": ("left", "right")}
    names = ("head", "left", "right", "join")
    rule = StallRule(names, STALL_S, sources)
    other = {"left": "right", "right": "left"}[late]
    found: list[Stall] = []
    for s in range(400):
        reports = {name: report(s, "batch") for name in names}
        if s >= BEGIN_S:
            reports = {
                "head": report(104, "window"), other: report(104, "window"),
                late: report(100, "gradient"), "join": report(100, "input"),
            }  # fmt: skip
        shown = {name: one | {"time": s} for name, one in reports.items()}
        found = rule.look(float(s), read(shown)) or found
    assert ("join", late) in {stall.modules for stall in found}
    assert ("join", other) not in {stall.modules for stall in found}


@pytest.mark.parametrize(("other", "stalled"), [("replicas", True), ("gradient", False)])
def test_replicas_that_all_wait_for_each_other(other: str, stalled: bool) -> None:
    """One that has not come to the marker yet may wait for something else."""
    names = ("head", "wide.1", "wide.2", "tail")
    sources = {"wide.1": ("head",), "wide.2": ("head",), "tail": ("wide.1", "wide.2")}
    rule = StallRule(names, STALL_S, sources)
    found: list[Stall] = []
    for s in range(400):
        reports = {name: report(s, "batch") for name in names}
        if s >= BEGIN_S:
            doing = {"head": "window", "wide.1": "replicas", "wide.2": other, "tail": "input"}
            reports = {
                name: report(100, what) | {"doing_s": float(s - BEGIN_S)}
                for name, what in doing.items()
            }
        shown = {name: one | {"time": s} for name, one in reports.items()}
        found = rule.look(float(s), read(shown)) or found
    messages = [stall.message for stall in found if "replicas" in stall.message]
    assert bool(messages) is stalled
