"""A model and all that it needs where it runs -> one folder."""

from relayquant.flow.bundle.export import export_bundle

__all__ = ["export_bundle"]
