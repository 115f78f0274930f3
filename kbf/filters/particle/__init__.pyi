from kbf.filters.particle import (
    bootstrap as bootstrap,
    learned as learned,
    resampling as resampling,
)
