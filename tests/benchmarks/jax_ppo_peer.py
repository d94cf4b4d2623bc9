"""PPO on gymnax's CartPole-v1 as one jitted program, designed like PureJaxRL: 4 envs, rollouts of 128 steps, on one device.

The hyperparameters are PureJaxRL's for CartPole. Training ends when the latest 100 episodes return 475 on average.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import gymnax
import jax
import jax.numpy as jnp
import optax

NUM_ENVS, NUM_STEPS, TOTAL_STEPS = 4, 128, 500_000
EPOCHS, MINIBATCHES, LEARNING_RATE, MAX_GRAD_NORM = 4, 4, 2.5e-4, 0.5
GAMMA, GAE_LAMBDA, CLIP, ENTROPY_WEIGHT, VALUE_WEIGHT = 0.99, 0.95, 0.2, 0.01, 0.5
TARGET, EPISODES = 475.0, 100
NUM_UPDATES = TOTAL_STEPS // (NUM_ENVS * NUM_STEPS)

ENV, PARAMS = gymnax.make("CartPole-v1")


def mlp_init(key: jax.Array, outputs: int, last_gain: float) -> list[tuple[jax.Array, jax.Array]]:
    sizes, gains = (4, 64, 64, outputs), (2**0.5, 2**0.5, last_gain)
    return [
        (jax.nn.initializers.orthogonal(gain)(sub, (inputs, size)), jnp.zeros(size))
        for sub, inputs, size, gain in zip(jax.random.split(key, 3), sizes[:-1], sizes[1:], gains, strict=True)
    ]


def mlp(layers: list[tuple[jax.Array, jax.Array]], value: jax.Array) -> jax.Array:
    for weight, bias in layers[:-1]:
        value = jnp.tanh(value @ weight + bias)
    return value @ layers[-1][0] + layers[-1][1]


def schedule(count: jax.Array) -> jax.Array:
    return LEARNING_RATE * (1 - count // (EPOCHS * MINIBATCHES) / NUM_UPDATES)


OPTIMIZER = optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adam(schedule, eps=1e-5))


class Runner(NamedTuple):
    key: jax.Array
    agent: Any
    optimizer: Any
    state: Any
    observation: jax.Array
    running: jax.Array  # return so far of each env's episode
    latest: jax.Array  # ring buffer of the latest episodes' returns
    episodes: jax.Array
    updates: jax.Array


class Batch(NamedTuple):
    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array


def initialize(key: jax.Array) -> Runner:
    key, actor, critic, envs = jax.random.split(key, 4)
    agent = {"actor": mlp_init(actor, 2, 0.01), "critic": mlp_init(critic, 1, 1.0)}
    observation, state = jax.vmap(ENV.reset, (0, None))(jax.random.split(envs, NUM_ENVS), PARAMS)
    none, zero = jnp.zeros(EPISODES), jnp.zeros((), jnp.int32)
    return Runner(key, agent, OPTIMIZER.init(agent), state, observation, jnp.zeros(NUM_ENVS), none, zero, zero)


def act(runner: Runner, _: None) -> tuple[Runner, Batch]:
    key, sample, step = jax.random.split(runner.key, 3)
    logits = jax.nn.log_softmax(mlp(runner.agent["actor"], runner.observation))
    action = jax.random.categorical(sample, logits)
    log_prob = jnp.take_along_axis(logits, action[:, None], 1)[:, 0]
    value = mlp(runner.agent["critic"], runner.observation)[:, 0]
    observation, state, reward, terminated, truncated, _ = jax.vmap(ENV.step, (0, 0, 0, None))(
        jax.random.split(step, NUM_ENVS), runner.state, action, PARAMS
    )
    done, running = terminated | truncated, runner.running + reward
    # Finished episodes take the next slots of the ring; the others write out of bounds, which JAX drops.
    slot = (runner.episodes + jnp.cumsum(done) - 1) % EPISODES
    latest = runner.latest.at[jnp.where(done, slot, EPISODES)].set(running, mode="drop")
    batch = Batch(runner.observation, action, log_prob, value, reward, done)
    runner = runner._replace(key=key, state=state, observation=observation, running=jnp.where(done, 0.0, running))
    return runner._replace(latest=latest, episodes=runner.episodes + done.sum()), batch


def advantages(batch: Batch, last_value: jax.Array) -> jax.Array:
    """Schulman et al. (2016); as in PureJaxRL, a truncated episode counts as a terminated one."""

    def back(carry: tuple[jax.Array, jax.Array], step: Batch) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        advantage, following = carry
        delta = step.reward + GAMMA * following * ~step.done - step.value
        advantage = delta + GAMMA * GAE_LAMBDA * ~step.done * advantage
        return (advantage, step.value), advantage

    return jax.lax.scan(back, (jnp.zeros_like(last_value), last_value), batch, reverse=True, unroll=16)[1]


def loss(agent: Any, batch: Batch, advantage: jax.Array, returns: jax.Array) -> jax.Array:
    logits = jax.nn.log_softmax(mlp(agent["actor"], batch.observation))
    ratio = jnp.exp(jnp.take_along_axis(logits, batch.action[:, None], 1)[:, 0] - batch.log_prob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = -jnp.minimum(advantage * ratio, advantage * ratio.clip(1 - CLIP, 1 + CLIP)).mean()
    value = mlp(agent["critic"], batch.observation)[:, 0]
    near = batch.value + (value - batch.value).clip(-CLIP, CLIP)
    value_loss = 0.5 * jnp.maximum(jnp.square(value - returns), jnp.square(near - returns)).mean()
    entropy = -(jnp.exp(logits) * logits).sum(1).mean()
    return policy_loss + VALUE_WEIGHT * value_loss - ENTROPY_WEIGHT * entropy


def update(runner: Runner) -> Runner:
    runner, batch = jax.lax.scan(act, runner, length=NUM_STEPS)
    advantage = advantages(batch, mlp(runner.agent["critic"], runner.observation)[:, 0])
    data = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (batch, advantage, advantage + batch.value))

    def minibatch(carry: tuple[Any, Any], rows: Any) -> tuple[tuple[Any, Any], None]:
        agent, optimizer = carry
        steps, optimizer = OPTIMIZER.update(jax.grad(loss)(agent, *rows), optimizer, agent)
        return (optax.apply_updates(agent, steps), optimizer), None

    def epoch(carry: tuple[Any, Any], key: jax.Array) -> tuple[tuple[Any, Any], None]:
        order = jax.random.permutation(key, NUM_ENVS * NUM_STEPS)
        shuffled = jax.tree.map(lambda leaf: leaf[order].reshape(MINIBATCHES, -1, *leaf.shape[1:]), data)
        return jax.lax.scan(minibatch, carry, shuffled)

    key, sub = jax.random.split(runner.key)
    learned, _ = jax.lax.scan(epoch, (runner.agent, runner.optimizer), jax.random.split(sub, EPOCHS))
    return runner._replace(key=key, agent=learned[0], optimizer=learned[1], updates=runner.updates + 1)


def unsolved(runner: Runner) -> jax.Array:
    solved = (runner.episodes >= EPISODES) & (runner.latest.mean() >= TARGET)
    return ~solved & (runner.updates < NUM_UPDATES)


@jax.jit
def train(key: jax.Array) -> Runner:
    return jax.lax.while_loop(unsolved, update, initialize(key))


def solve_cartpole(seed: int, started: float) -> dict[str, Any]:
    """Trains from a seed; `started` is the start time of the process, in seconds since 1970."""
    key, start = jax.random.key(seed), time.perf_counter()
    program = train.lower(key).compile()
    compiled = time.perf_counter()
    runner = jax.block_until_ready(program(key))
    seconds, steps = time.perf_counter() - compiled, int(runner.updates) * NUM_ENVS * NUM_STEPS
    solved = not unsolved(runner) and float(runner.latest.mean()) >= TARGET
    return {
        "env_steps_to_target": steps if solved else None,
        "seconds_to_target": seconds if solved else None,
        "wall_seconds_to_target": time.time() - started if solved else None,
        "compile_seconds": compiled - start,
        "steps_per_second": steps / seconds,
    }
