"""Collections in a long call leave out what was alive before it."""

import gc
import weakref

import pytest

from relayquant.base.garbage import spare_older_objects


@pytest.fixture(autouse=True)
def _nothing_frozen():
    """What the tests themselves froze when they began (`conftest.py`) is not frozen here."""
    gc.unfreeze()
    yield
    gc.freeze()


class Cycle:
    """An object that only the collector frees."""

    def __init__(self):
        self.itself = self


def test_spare_older_objects__collections_look_at_new_objects_only():
    old = weakref.ref(Cycle())
    with spare_older_objects():
        new = weakref.ref(Cycle())
        gc.collect()
        assert new() is None
        assert old() is not None
    gc.collect()
    assert old() is None
    assert gc.get_freeze_count() == 0


def test_spare_older_objects__an_error_ends_it():
    with pytest.raises(ZeroDivisionError), spare_older_objects():
        _ = 1 / 0
    assert gc.get_freeze_count() == 0


def test_spare_older_objects__a_block_in_a_block_ends_with_the_outer_one():
    with spare_older_objects():
        with spare_older_objects():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_spare_older_objects__what_the_process_has_frozen_stays_so():
    gc.freeze()
    try:
        with spare_older_objects():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
