from kbf.filters.kernel_monte_carlo import (
    density_ratio as density_ratio,
    filter as filter,
    model as model,
)
