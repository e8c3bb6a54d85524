"""The language model that tests of compressed weights share."""

import pytest
from tiny_llama import make_llama


@pytest.fixture(scope="module")
def llama():
    return make_llama()
