"""`InlineFigure`: a figure of matplotlib that notebooks display without pyplot."""

import io

from matplotlib.figure import Figure


class InlineFigure(Figure):
    """A figure that is displayed once, where it is the value of a cell.

    pyplot does not know it and therefore neither keeps it in memory nor displays it a second time
    at the end of the cell. ``%matplotlib`` is not required; after ``%matplotlib inline`` the
    figure is displayed as any other one, also once.
    """

    def _repr_png_(self) -> bytes:
        """Returns the figure as a PNG file, which notebooks display."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()
