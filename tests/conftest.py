"""Settings that every test shares: CPU only, eight fake devices, strict shapes and types."""

import os
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# A shell's background job ignores Ctrl-C, and so would every program that a test starts and stops.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("ci")


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Folder of warm starts and compiled programs, shared by all runs of a worker's tests."""
    return tmp_path_factory.mktemp("cache")
