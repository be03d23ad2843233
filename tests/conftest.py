"""Eight CPU devices for all tests, before any backend starts."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
