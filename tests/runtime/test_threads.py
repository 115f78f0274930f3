"""Settings of a process: threads come back, whatever happens in between."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from kbf.data.synthetic import SyntheticData
from kbf.filters.kernel.simulated_kbf import SimulatedKBF
from kbf.runtime import threads as thread_settings
from kbf.runtime.threads import one_thread, release_memory, side_by_side
from kbf.ssm import rotation


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_one_thread_is_for_a_while(two_threads):
    @one_thread()
    def failing():
        raise ValueError(f"{torch.get_num_threads()} thread")

    with pytest.raises(ValueError, match="1 thread"):
        failing()
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("parent", "threads"), [(None, 3), ("a command", 1)])
def test_work_runs_side_by_side_but_in_a_worker(two_threads, monkeypatch, parent, threads):
    monkeypatch.setattr(thread_settings, "CORES", 4)
    monkeypatch.setattr(thread_settings.multiprocessing, "parent_process", lambda: parent)
    together = threading.Barrier(threads)

    def work(k: int) -> tuple[int, int, int]:
        together.wait(20)  # would break if fewer threads than that came
        return 10 * k, torch.get_num_threads(), threading.get_ident()

    done = side_by_side(work, range(3))
    assert [result for result, _, _ in done] == [0, 10, 20]
    assert {torch_threads for _, torch_threads, _ in done} == {2}
    assert len({ident for _, _, ident in done}) == threads


def test_an_error_of_one_is_raised(monkeypatch):
    monkeypatch.setattr(thread_settings, "CORES", 2)
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda k: 1 / k, [1, 0])
    assert side_by_side(lambda k: k, []) == []


def test_a_filter_is_made_with_one_thread_and_the_number_comes_back(two_threads, monkeypatch):
    seen: list[int] = []
    monkeypatch.setattr(
        SimulatedKBF, "observations", lambda *rest: seen.append(torch.get_num_threads()) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        SimulatedKBF(points=20, run=100).fit(SyntheticData(rotation(), 30, 5).train)
    assert seen == [1] and torch.get_num_threads() == 2


def test_freed_memory_goes_back_to_the_system():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    blocks = [bytes(1000) for _ in range(100_000)]
    held = resident()
    del blocks[::2], blocks[:-1]
    release_memory()
    assert held - resident() > 50e6
