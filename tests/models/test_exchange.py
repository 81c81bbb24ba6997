"""Tokens reach the devices that need them, once each, and what comes back is added: against loops over tokens, on devices of the CPU."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_llm.models import exchange

WAYS, N, K, D = 8, 12, 3, 5


def on_devices(run, *arrays):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:WAYS]), ("expert",))
    spec = P("expert")
    local = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * len(arrays), out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(local)(*arrays))


def devices_of(kind):
    """[WAYS N, K] devices that the tokens need; some need none, and one of the devices may be needed by all."""
    rng = np.random.default_rng(len(kind))
    found = rng.integers(0, WAYS, (WAYS * N, K))
    if kind == "one":
        found[:] = 5
    found[rng.random(WAYS * N) < 0.2] = WAYS  # padding
    return found


def arrived(devices, x):
    """Rows that each device gets: of the first device's tokens, of the second's, and so on, then zeros."""
    found = np.zeros((WAYS, WAYS * N, x.shape[1]), x.dtype)
    for device in range(WAYS):
        rows = [x[token] for token in range(WAYS * N) if device in devices[token]]
        found[device, : len(rows)] = rows if rows else 0
    return found.reshape(-1, x.shape[1])


@pytest.mark.parametrize("kind", ["any", "one"])
def test_each_device_gets_the_tokens_that_it_needs_once(kind):
    devices, x = devices_of(kind), np.random.default_rng(1).normal(size=(WAYS * N, D)).astype(np.float32)

    def run(devices, x):
        return exchange.sent(x, exchange.route_of(devices, WAYS, "expert"), "expert")

    np.testing.assert_array_equal(on_devices(run, devices, x), arrived(devices, x))


@pytest.mark.parametrize("kind", ["any", "one"])
def test_what_comes_back_is_added_where_the_tokens_lie(kind):
    devices, x = devices_of(kind), np.random.default_rng(2).normal(size=(WAYS * N, D)).astype(np.float32)

    def run(devices, x):
        route = exchange.route_of(devices, WAYS, "expert")
        rows = exchange.sent(x, route, "expert") * (1.0 + jax.lax.axis_index("expert"))
        return exchange.returned(rows, route, "expert")

    factor = np.array([sum(1.0 + d for d in set(own.tolist()) - {WAYS}) for own in devices])
    np.testing.assert_allclose(on_devices(run, devices, x), x * factor[:, None], rtol=1e-5, atol=1e-6)


def test_its_gradient_is_the_transpose():
    devices, x = devices_of("any"), np.random.default_rng(3).normal(size=(WAYS * N, D)).astype(np.float32)

    def run(devices, x):
        route = exchange.route_of(devices, WAYS, "expert")
        own = jax.lax.axis_index("expert")

        def objective(x):
            rows = exchange.sent(x, route, "expert")
            back = exchange.returned(rows**2 * (1.0 + own), route, "expert")
            return (back**2).sum()

        return jax.grad(objective)(x)

    # back = f x^2 where f is the sum of the needed devices' factors, so that the gradient is 4 f^2 x^3.
    factor = np.array([sum(1.0 + d for d in set(own.tolist()) - {WAYS}) for own in devices])[:, None]
    np.testing.assert_allclose(on_devices(run, devices, x), 4 * factor**2 * x**3, rtol=1e-4, atol=1e-4)
