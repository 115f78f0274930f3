from kbf.filters.kernel.update import (
    likelihood as likelihood,
    nearest_draws as nearest_draws,
    rule as rule,
)
