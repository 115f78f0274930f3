"""Recordings as buffers of a module: a checkpoint contains the memory of its filter."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from kbf.recording import Recording


class RecordingBuffers(nn.Module):
    """Recordings as buffers: they move with the module, and are saved with it."""

    def __init__(self, recordings: list[Recording]) -> None:
        super().__init__()
        for k, recording in enumerate(recordings):
            for name, leaf in recording._asdict().items():
                if leaf is not None:
                    self.register_buffer(f"{name}_{k}", leaf)

    def recordings(self) -> list[Recording]:
        """Return the recordings."""
        buffers = dict(self.named_buffers())
        count = sum(name.startswith("states_") for name in buffers)
        return [
            Recording(*(buffers.get(f"{n}_{k}") for n in Recording._fields))  # pyright: ignore[reportArgumentType]
            for k in range(count)
        ]

    @staticmethod
    def from_state(state: Mapping[str, Tensor], prefix: str) -> RecordingBuffers:
        """Return the buffers that were saved under names with this prefix."""
        memory = RecordingBuffers([])
        for name, leaf in state.items():
            if name.startswith(prefix):
                memory.register_buffer(name.removeprefix(prefix), leaf)
        return memory
