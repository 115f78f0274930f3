"""Errors that callers handle by type."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class FitError(ValueError):
    """The data do not determine a fit: too few steps, constant outputs, a singular matrix.

    Model selection rejects a candidate that raises it and continues with the others. Every other
    exception, such as one about shapes, is an error of the program or of the call; it is not
    caught.
    """


class DataError(ValueError):
    """Data cannot be used: columns are missing, values are not numbers, times decrease."""


class DataWarning(UserWarning):
    """Data is used, but an assumption does not hold for it."""


class MissingPackageError(ValueError):
    """An optional package is not installed, or cannot be imported."""


def nearest(name: str, known: Iterable[str], otherwise: str = "there are") -> str:
    """Return a hint for a name that is not among the known ones: the nearest one, or all of them.

    >>> nearest("speeed", ["speed", "place"])
    "did you mean 'speed'?"
    >>> nearest("S3", ["s2", "s3"])
    "did you mean 's3'?"
    >>> nearest("mood", ["speed", "place"], "they are")
    'they are speed, place'
    """
    names = list(known)
    alike = [each for each in names if each.casefold() == name.casefold()]
    near = alike or difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]!r}?" if near else f"{otherwise} {', '.join(names)}"


@contextmanager
def fit_errors() -> Iterator[None]:
    """Context or decorator that raises PyTorch's failed factorisations as `FitError`."""
    import torch  # here, since `kbf.FitError` does not require PyTorch

    try:
        yield
    except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
        raise FitError(str(error)) from error
