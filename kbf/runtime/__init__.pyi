from kbf.runtime import (
    allowlist as allowlist,
    atomic_files as atomic_files,
    errors as errors,
    html_repr as html_repr,
    hydra_quoting as hydra_quoting,
    instantiate as instantiate,
    interpolation as interpolation,
    memory_limit as memory_limit,
    optional_dependencies as optional_dependencies,
    provenance as provenance,
    tensor_files as tensor_files,
    threads as threads,
)
