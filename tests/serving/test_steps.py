"""Steps that arrive together: each session has its own response, in the order of the requests."""

import asyncio
from typing import Any

import pytest

import kbf
from kbf.serving import steps as module
from kbf.serving.sessions import Sessions
from kbf.serving.steps import Steps, responses
from kbf.serving.values import Refused


@pytest.fixture(scope="module")
def fitted():
    return kbf.load("example:rotation")


@pytest.fixture
def sessions(fitted):
    return Sessions(fitted, limit=20, expiry=100, settings={"max_delay": 5.0})


def step(x, **others):
    return {"obs": {"x_0": x, "x_1": 0.4}} | others


def values(response: Any) -> list[float]:
    return [each["value"] for each in response["estimates"].values()]


def test_a_bad_request_spoils_no_other_of_the_batch(sessions):
    asked = [step(0.1), {"obs": None}, step("0.3"), step(0.5), {"obs": {"x_0": 1.0}}, step(0.7)]
    batch = [sessions.create() for _ in asked]
    single = [sessions.create() for _ in asked]
    for _ in range(3):
        found = responses(list(zip(batch, asked, strict=True)), True)
        for k, session in enumerate(single):
            if k in (2, 4):
                with pytest.raises(Refused) as caught:
                    session.step(asked[k])
                assert isinstance(found[k], Refused) and str(found[k]) == str(caught.value)
            else:
                wanted = session.step(asked[k])
                assert values(found[k]) == pytest.approx(values(wanted), abs=1e-4)
                assert found[k]["step"] == wanted["step"]  # pyright: ignore[reportIndexIssue]


def test_an_error_of_a_batch_is_that_of_its_step(sessions, monkeypatch):
    """A batch with an error is taken one by one: no step is taken twice."""
    real = module.take_together
    batch, wanted = ([sessions.create() for _ in range(3)] for _ in range(2))

    def failing(filters, inputs):
        if batch[1].online in filters:
            raise ValueError("this observation\nis impossible")
        return real(filters, inputs)

    monkeypatch.setattr(module, "take_together", failing)
    found = responses([(each, step(0.2)) for each in batch], True)
    assert isinstance(found[1], Refused) and str(found[1]) == "this observation is impossible"
    for k in (0, 2):
        assert found[k] == wanted[k].step(step(0.2))
    assert [each.steps for each in batch] == [1, 0, 1]


@pytest.mark.parametrize("most", [64, 2])
def test_two_steps_of_a_session_keep_their_order(fitted, sessions, monkeypatch, most):
    """Also where a batch is full; a late reading is taken at its time."""
    monkeypatch.setattr(module, "MAX_TOGETHER", most)
    batches = []
    real = module.responses
    monkeypatch.setattr(
        module, "responses", lambda steps, joined: batches.append(len(steps)) or real(steps, joined)
    )
    batch, single = ([sessions.create() for _ in range(3)] for _ in range(2))
    asked = [step(0.1, time=1), step(0.5, time=2), step(0.3, time=1)]

    async def all_at_once():
        steps = Steps(fitted)
        assert steps.joined
        return await asyncio.gather(
            *(steps.take(session, each) for each in asked for session in batch)
        )

    found = asyncio.run(all_at_once())
    wanted = [session.step(each) for each in asked for session in single]
    for a, b in zip(found, wanted, strict=True):
        assert values(a) == pytest.approx(values(b), abs=1e-4) and a["step"] == b["step"]
    assert max(batches) == min(most, 3)


def test_a_fault_ends_each_request(fitted, sessions, monkeypatch):
    monkeypatch.setattr(module, "take_together", lambda *a: 1 / 0)
    batch = [sessions.create() for _ in range(2)]

    async def both():
        steps = Steps(fitted)
        tasks = (steps.take(session, step(0.1)) for session in batch)
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(each) for each in asyncio.run(both())] == [ZeroDivisionError] * 2


def test_lists_inside_of_an_observation_are_refused(sessions):
    asked = [step(0.1), {"obs": [[0.1, 0.1]]}, {"obs": [0.1, 0.2]}]
    found = responses([(sessions.create(), each) for each in asked], True)
    assert isinstance(found[1], Refused) and "without lists" in str(found[1])
    assert [isinstance(each, dict) for each in found] == [True, False, True]


def test_each_request_of_a_batch_gets_an_answer(sessions, fitted, monkeypatch):
    def failing(*_):
        raise RuntimeError("unexpected")

    monkeypatch.setattr(module, "responses", failing)

    async def ask():
        steps = Steps(fitted)
        return await asyncio.gather(
            *(steps.take(sessions.create(), step(0.1)) for _ in range(3)), return_exceptions=True
        )

    assert [str(each) for each in asyncio.run(ask())] == ["unexpected"] * 3
