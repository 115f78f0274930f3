from kbf.filters.regression import (
    boosting as boosting,
    kernel_ridge as kernel_ridge,
    window as window,
    window_width as window_width,
)
