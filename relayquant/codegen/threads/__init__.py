"""Lowered module -> the same with a pool of threads of its own."""

from relayquant.codegen.threads.pool import add_pool

__all__ = ["add_pool"]
