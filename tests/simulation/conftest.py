import logging

import pytest


@pytest.fixture(autouse=True)
def quiet():
    """What goes wrong is made to."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
