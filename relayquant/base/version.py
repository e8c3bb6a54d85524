"""Version of the package. The build, the command line and `relayquant.__version__` read it here."""

__version__ = "0.1.0"
