from kbf.plots import (
    animation as animation,
    charts as charts,
    frames as frames,
    tracks as tracks,
)
