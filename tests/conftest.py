"""Settings that every test shares: CPU only, eight fake devices, strict shapes and types."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("ci")
