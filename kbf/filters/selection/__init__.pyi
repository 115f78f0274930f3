from kbf.filters.selection import (
    auto as auto,
    cross_validation as cross_validation,
    drift as drift,
    requirements as requirements,
    stacking as stacking,
)
