"""Steps of sessions in the event loop: requests that arrive together are one batch of the filter.

While a batch is computed further requests arrive, which are the next batch.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from kbf.filters.parallel_rollout import draws
from kbf.filters.protocols import control_components
from kbf.fitted.fitted_filter import FittedFilter
from kbf.fitted.online import take_together
from kbf.fitted.program import zero_observation
from kbf.serving.sessions import Asked, Session
from kbf.serving.values import Refused, one_line

# Steps of one batch, at most; other requests are answered between two batches.
MAX_TOGETHER = 64


class Waiting(NamedTuple):
    """A request for a step, and the future of its response."""

    session: Session
    request: dict[str, Any]
    found: asyncio.Future[dict[str, Any]]


class Steps:
    """The requests for steps that wait for the next batch."""

    def __init__(self, fitted: FittedFilter) -> None:
        """Steps of a filter that draws random numbers are taken one by one."""
        trained = fitted.trained
        self.joined: bool = not draws(
            trained.filter, zero_observation(trained), control_components(trained.filter)
        )
        self.waiting: list[Waiting] = []

    async def take(self, session: Session, request: dict[str, Any]) -> dict[str, Any]:
        """Take the step of a session with the next batch; return its response.

        Raises:
            Refused: as `Session.step`.
        """
        loop = asyncio.get_running_loop()
        if not self.waiting:
            loop.call_soon(self.next_batch)
        self.waiting.append(Waiting(session, request, loop.create_future()))
        return await self.waiting[-1].found

    def next_batch(self) -> None:
        """Take the first waiting step of each session, and set the results."""
        batch: dict[str, Waiting] = {}
        rest = []
        for each in self.waiting:
            if each.session.name in batch or len(batch) == MAX_TOGETHER:
                rest.append(each)
            else:
                batch[each.session.name] = each
        self.waiting = rest
        if rest:
            asyncio.get_running_loop().call_soon(self.next_batch)
        steps = [(each.session, each.request) for each in batch.values()]
        try:
            results = responses(steps, self.joined)
        except Exception as error:  # each request gets an answer
            results = [error] * len(batch)
        for each, found in zip(batch.values(), results, strict=True):
            if each.found.done():  # the request was cancelled
                continue
            if isinstance(found, Exception):
                each.found.set_exception(found)
            else:
                each.found.set_result(found)


def responses(
    steps: Sequence[tuple[Session, dict[str, Any]]], joined: bool
) -> list[dict[str, Any] | Exception]:
    """Return the response to a step of each session, or the error.

    Args:
        steps: sessions, all different, and requests.
        joined: take the steps as one batch where the filter can.
    """
    found: list[dict[str, Any] | Exception] = []
    together: list[tuple[int, Session, Asked]] = []
    for session, request in steps:
        try:
            asked = session.read(request)
            if joined and asked.inputs is not None and session.online.joins(asked.inputs):
                together.append((len(found), session, asked))
                found.append({})
            else:
                found.append(session.take(asked))
        except Exception as error:
            found.append(error)
    for (k, _, _), response in zip(together, batch_of(together), strict=True):
        found[k] = response
    return found


def batch_of(together: list[tuple[int, Session, Asked]]) -> list[dict[str, Any] | Exception]:
    """Return the responses of steps that are one batch; one by one if the batch has an error."""
    if not together:
        return []
    sessions = [session for _, session, _ in together]
    asked = [each for _, _, each in together]
    inputs = [each.inputs for each in asked if each.inputs is not None]
    try:
        estimates = take_together([session.online for session in sessions], inputs)
    except Exception as error:  # of one of the observations: no other filter has changed
        if len(together) > 1:
            return [response for each in together for response in batch_of([each])]
        return [Refused(422, one_line(error)) if isinstance(error, ValueError) else error]
    answers: list[dict[str, Any] | Exception] = []
    for session, estimate, each in zip(sessions, estimates, asked, strict=True):
        try:
            answers.append(session.answer(estimate, each.obs))
        except Exception as error:
            answers.append(error)
    return answers
