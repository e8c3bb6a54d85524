"""The error of libraries and bundles."""


class LibraryError(RuntimeError):
    """A library or a bundle that cannot be loaded, or has no such function; says which and what to
    do.
    """
