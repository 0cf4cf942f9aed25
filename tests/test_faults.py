"""Whole runs that suffer one fault after the other and end as if there had been none.

What each fault is, and all those that are not struck here, stand in faults.py.
"""

import faults
import pytest

pytestmark = pytest.mark.timeout(1200)

# Several faults are struck at one run, because most of the time of a run is its start.
CHAINS = {
    "learner": (
        "learner killed before its first checkpoint",
        "learner killed while a checkpoint is written",
        "server killed in mid-response",
        "server killed in mid-update",
        "SIGTERM to learner and server at once",
        "search engine killed, back after 2 s",
        "learner may write no file beyond 20 kB",
    ),
    "server": (
        "server answers 500 six times",
        "server answers garbage six times",
        "server closes six connections",
        "server answers with weights of no version of the run",
        "server does not answer four requests",
        "server sends NaN",
    ),
    "two servers": ("one of two servers behind a router killed",),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with faults.World(tmp_path_factory.mktemp("faults") / "world", updates=60) as world:
        yield world


@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_ends_as_if_nothing_had_happened(chain, world):
    known = {fault.name: fault for fault in faults.FAULTS}
    faults.run_faults(world, [known[name] for name in CHAINS[chain]])
