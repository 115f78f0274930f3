"""Settings of a process: threads come back, whatever happens in between."""

from __future__ import annotations

import pytest
import torch

from kbf.data.synthetic import SyntheticData
from kbf.filters.kernel.simulated_memory import SimulatedMemoryKBF
from kbf.runtime import process
from kbf.runtime.process import every_core, one_thread
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


@pytest.mark.parametrize(("parent", "threads"), [(None, 4), ("a command", 2)])
def test_work_on_large_arrays_has_every_core_but_in_a_worker(two_threads, monkeypatch, parent, threads):
    monkeypatch.setattr(process, "CORES", 4)
    monkeypatch.setattr(process.multiprocessing, "parent_process", lambda: parent)
    with pytest.raises(ValueError, match=f"{threads} threads"), every_core():
        raise ValueError(f"{torch.get_num_threads()} threads")
    assert torch.get_num_threads() == 2


def test_a_filter_is_made_with_one_thread_and_the_number_comes_back(two_threads, monkeypatch):
    seen: list[int] = []
    monkeypatch.setattr(SimulatedMemoryKBF, "observations", lambda *rest: seen.append(torch.get_num_threads()) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        SimulatedMemoryKBF(points=20, run=100).condition(SyntheticData(rotation(), 30, 5).train)
    assert seen == [1] and torch.get_num_threads() == 2
