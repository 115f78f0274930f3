from kbf.runtime import (
    distributed as distributed,
    extras as extras,
    files as files,
    instantiate as instantiate,
    moved as moved,
    notebook as notebook,
    process as process,
    recipe as recipe,
    registry as registry,
    tensors as tensors,
    words as words,
)
