"""Some of the faults of `faults.py` that a run must survive, struck at real processes."""

import faults
import pytest

BY_NAME = {fault.name: fault for fault in faults.FAULTS}
KILL = "learner killed between checkpoints"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def world(tmp_path_factory, cache):
    with faults.World(tmp_path_factory.mktemp("faults"), 28, cache) as world:
        yield world


@pytest.mark.parametrize(
    "names",
    [
        ("server killed in mid-update", KILL, "search engine killed, back after 2 s"),
        ("server answers 500 twelve times", "server answers garbage twelve times"),
    ],
    ids=lambda names: names[0],
)
def test_a_run_goes_on_to_the_bit(names, world):
    """It says what it should, gives no prompt up, and ends as an undisturbed run does."""
    outcomes = []
    faults.run_faults(world, [BY_NAME[name] for name in names], outcomes.append)
    assert [outcome.fault for outcome in outcomes] == list(names)
    for outcome in outcomes:
        assert outcome.repeated <= (faults.EVERY if outcome.fault == KILL else 0), outcome
