from kbf.plots import (
    animation as animation,
    charts as charts,
    estimates as estimates,
    frames as frames,
    tracks as tracks,
)
