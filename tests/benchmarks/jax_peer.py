"""gymnax's side: its CartPole-v1 with the same transforms in JAX."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import gymnax
import jax
import jax.numpy as jnp
import numpy as np

from .worker import Timed

FRAMES = 4
Transition = dict[str, jax.Array]


class Statistics(NamedTuple):
    """Sums of differences from a reference observation, so that float32 does not cancel."""

    reference: jax.Array
    count: jax.Array
    total: jax.Array
    squares: jax.Array

    def add(self, observation: jax.Array, weight: jax.Array) -> Statistics:
        away = (observation - self.reference) * weight[:, None]
        return Statistics(
            self.reference,
            self.count + weight.sum(),
            self.total + away.sum(0),
            self.squares + jnp.square(away).sum(0),
        )

    def normalize_and_clip(self, observation: jax.Array) -> jax.Array:
        mean = self.total / self.count
        scale = jax.lax.rsqrt(self.squares / self.count - jnp.square(mean) + 1e-8)
        return ((observation - self.reference - mean) * scale).clip(-10, 10)


class Carry(NamedTuple):
    key: jax.Array
    state: Any
    observation: jax.Array
    statistics: Statistics


class CartPole:
    """A batch of gymnax's CartPole-v1; `stack` transforms all observations, final ones included."""

    def __init__(self, num_envs: int, stack: bool) -> None:
        self.env, self.params = gymnax.make("CartPole-v1")
        self.num_envs = num_envs
        self.stack = stack

    def reset(self, key: jax.Array) -> Carry:
        key, sub = jax.random.split(key)
        keys = jax.random.split(sub, self.num_envs)
        first, state = jax.vmap(self.env.reset, (0, None))(keys, self.params)
        zeros = jnp.zeros(4)
        statistics = Statistics(first[0], jnp.zeros(()), zeros, zeros)
        statistics = statistics.add(first, jnp.ones(self.num_envs))
        if self.stack:
            first = self._repeat(statistics.normalize_and_clip(first))
        return Carry(key, state, first, statistics)

    def step(self, carry: Carry, action: jax.Array) -> tuple[Carry, Transition]:
        """The next carry, and the stored transition."""
        key, sub = jax.random.split(carry.key)
        keys = jax.random.split(sub, self.num_envs)
        step = jax.vmap(self.env.step, (0, 0, 0, None))
        results = step(keys, carry.state, action, self.params)
        first, state, reward, terminated, truncated, info = results
        final = info["final_observation"]
        done = terminated | truncated
        statistics = carry.statistics
        observation = first
        if self.stack:
            # Each successor counts once, and so do initial observations after a reset.
            statistics = statistics.add(final, jnp.ones(self.num_envs))
            statistics = statistics.add(first, done.astype(jnp.float32))
            newest = statistics.normalize_and_clip(final)[:, None]
            final = jnp.concatenate([carry.observation[:, 1:], newest], 1)
            initial = self._repeat(statistics.normalize_and_clip(first))
            observation = jnp.where(done[:, None, None], initial, final)
        transition = {
            "observation": carry.observation,
            "action": action,
            "next_observation": final,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "done": done,
        }
        return Carry(key, state, observation, statistics), transition

    def random_step(self, carry: Carry, _: None) -> tuple[Carry, Transition]:
        key, sub = jax.random.split(carry.key)
        action = jax.random.randint(sub, (self.num_envs,), 0, 2)
        return self.step(carry._replace(key=key), action)

    def _repeat(self, observation: jax.Array) -> jax.Array:
        return jnp.broadcast_to(observation[:, None], (self.num_envs, FRAMES, 4))


def cartpole(num_envs: int, stack: bool, num_steps: int | None = None) -> Timed:
    """One jitted step with precomputed actions, or `num_steps` in a `lax.scan` with random ones."""
    env = CartPole(num_envs, stack)
    carry = jax.jit(env.reset)(jax.random.key(0))
    transition: Any = None
    if num_steps is None:
        step = jax.jit(env.step, donate_argnums=0)
        random = np.random.default_rng(0).integers(0, 2, (16, num_envs))
        actions = itertools.cycle([jnp.asarray(row) for row in random])
    else:

        def rollout(carry: Carry, _: None) -> tuple[Carry, Transition]:
            return jax.lax.scan(env.random_step, carry, length=num_steps)

        step = jax.jit(rollout, donate_argnums=0)
        actions = itertools.repeat(None)

    def call() -> None:
        nonlocal carry, transition
        carry, transition = step(carry, next(actions))

    return Timed(call, num_steps or 1, lambda: jax.block_until_ready((carry, transition)))
