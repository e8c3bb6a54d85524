"""Lowered module -> the same module with a thread pool."""

from relayquant.codegen.threads.pool import add_pool

__all__ = ["add_pool"]
