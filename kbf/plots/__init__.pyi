from kbf.plots import (
    animation as animation,
    bars as bars,
    charts as charts,
    estimates as estimates,
    frames as frames,
    inline_figure as inline_figure,
    tracks as tracks,
)
