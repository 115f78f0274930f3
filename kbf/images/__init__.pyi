from kbf.images import (
    augment as augment,
    encoders as encoders,
    encodings as encodings,
    losses as losses,
    pixel_ridge as pixel_ridge,
)
