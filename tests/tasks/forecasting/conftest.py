from collections.abc import Iterator

import pytest

from tests.planning_requests import seeding_constants


@pytest.fixture(scope="module")
def short_seeding() -> Iterator[None]:
    """Seeding in the seconds of simulated scenarios: 2 s while nothing is known, and at least half a second."""
    with seeding_constants(2.0, 0.5):
        yield
