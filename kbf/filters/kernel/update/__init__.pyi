from kbf.filters.kernel.update import (
    nearest_draws as nearest_draws,
    rule as rule,
)
