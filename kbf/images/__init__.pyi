from kbf.images import (
    augment as augment,
    codes as codes,
    encoders as encoders,
    losses as losses,
)
