"""What rules say when they decline: the log of `relayquant.ir.rewrite`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hear_declined() -> Iterator[list[tuple[str, str, str]]]:
    """Return (rule, value, reason) of the rules that decline meanwhile."""
    logger, heard = logging.getLogger("relayquant.ir.rewrite"), []
    handler, level = logging.Handler(), logger.level
    handler.emit = lambda record: heard.append(record.args)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
