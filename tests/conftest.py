from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Eight gloo processes, for every test that needs real ranks."""
    pool = RankPool(8)
    yield pool
    pool.close()
