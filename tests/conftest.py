from collections.abc import Iterator

import pytest

from tests.ranks import RankPool
from tests.slurm import Slurm, cluster, missing


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Eight gloo processes, for every test that needs real ranks."""
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A SLURM of one node."""
    if lacks := missing():
        pytest.skip(f"SLURM cannot be started here: no {', '.join(lacks)}")
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running
