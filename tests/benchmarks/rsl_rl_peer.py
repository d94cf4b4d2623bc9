"""rsl_rl's side: the arm of examples/robot.py as a hand-written `VecEnv`, with rsl_rl's own PPO.

Everything up to `evaluate` is what a user of rsl_rl writes; its lines are counted.
"""

import math
import time
from typing import Any

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

from .worker import Timed

ITERATIONS = 5


# The arm in plain PyTorch.
class ArmEnv(VecEnv):
    dt = 0.05
    gravity = 10.0
    max_torque = 2.0
    noise_std = 0.01
    sensor_max_delay = 2
    motor_max_delay = 1
    history_length = 5

    def __init__(self, num_envs: int, device: str = "cpu") -> None:
        self.num_envs = num_envs
        self.num_actions = 1
        self.max_episode_length = 200
        self.device = device
        self.cfg: dict[str, Any] = {}
        # Mass, length, friction and motor gain
        self.robot_low = torch.tensor([0.8, 0.9, 0.0, 0.9], device=device)
        self.robot_high = torch.tensor([1.2, 1.1, 0.1, 1.2], device=device)
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long, device=device)
        self.angle = torch.zeros(num_envs, device=device)
        self.speed = torch.zeros(num_envs, device=device)
        self.robot = torch.zeros(num_envs, 4, device=device)
        self.sensor_delay = torch.zeros(num_envs, dtype=torch.long, device=device)
        self.motor_delay = torch.zeros(num_envs, dtype=torch.long, device=device)
        # The newest is the last.
        self.measured = torch.zeros(num_envs, self.sensor_max_delay + 1, 2, device=device)
        self.stack = torch.zeros(num_envs, self.history_length, 2, device=device)
        self.commands = torch.zeros(num_envs, self.motor_max_delay + 1, device=device)
        self.return_sum = torch.zeros(num_envs, device=device)
        self.upright_sum = torch.zeros(num_envs, device=device)
        self.rows = torch.arange(num_envs, device=device)
        self.reset_idx(self.rows)

    def reset_idx(self, env_ids: torch.Tensor) -> None:
        n = len(env_ids)
        self.angle[env_ids] = (2 * torch.rand(n, device=self.device) - 1) * math.pi
        self.speed[env_ids] = 2 * torch.rand(n, device=self.device) - 1
        fraction = torch.rand(n, 4, device=self.device)
        self.robot[env_ids] = self.robot_low + fraction * (self.robot_high - self.robot_low)
        self.sensor_delay[env_ids] = torch.randint(
            self.sensor_max_delay + 1, (n,), device=self.device
        )
        self.motor_delay[env_ids] = torch.randint(
            self.motor_max_delay + 1, (n,), device=self.device
        )
        measurement = self.measure(self.angle[env_ids]).unsqueeze(1)
        self.measured[env_ids] = measurement
        self.stack[env_ids] = measurement
        self.commands[env_ids] = 0
        self.return_sum[env_ids] = 0
        self.upright_sum[env_ids] = 0
        self.episode_length_buf[env_ids] = 0

    def measure(self, angle: torch.Tensor) -> torch.Tensor:
        sensor = torch.stack([torch.cos(angle), torch.sin(angle)], -1)
        return sensor + self.noise_std * torch.randn_like(sensor)

    def get_observations(self) -> TensorDict:
        state = [torch.cos(self.angle), torch.sin(self.angle), self.speed]
        critic = torch.cat([torch.stack(state, -1), self.robot], -1)
        groups = {"policy": self.stack.flatten(1), "critic": critic}
        return TensorDict(groups, [self.num_envs], device=self.device)

    def physics(self, action: torch.Tensor) -> torch.Tensor:
        """Moves the arms. Returns the rewards."""
        mass, length, friction, gain = self.robot.unbind(-1)
        torque = gain * self.max_torque * action - friction * self.speed
        acceleration = 1.5 * self.gravity / length * torch.sin(self.angle)
        acceleration = acceleration + 3 * torque / (mass * length**2)
        self.speed = (self.speed + self.dt * acceleration).clamp(-8, 8)
        self.angle = self.angle + self.dt * self.speed
        angle = torch.remainder(self.angle + math.pi, 2 * math.pi) - math.pi
        return -0.1 * (angle**2 + 0.1 * self.speed**2 + 0.01 * action**2)

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict]:
        self.commands = torch.cat([self.commands[:, 1:], actions.clamp(-1, 1)], 1)
        reward = self.physics(self.commands[self.rows, self.motor_max_delay - self.motor_delay])
        measurement = self.measure(self.angle).unsqueeze(1)
        self.measured = torch.cat([self.measured[:, 1:], measurement], 1)
        late = self.measured[self.rows, self.sensor_max_delay - self.sensor_delay]
        self.stack = torch.cat([self.stack[:, 1:], late.unsqueeze(1)], 1)
        self.episode_length_buf += 1
        self.return_sum += reward
        self.upright_sum += torch.cos(self.angle) > 0.95
        time_outs = self.episode_length_buf >= self.max_episode_length
        extras: dict[str, Any] = {"time_outs": time_outs}
        env_ids = time_outs.nonzero().flatten()
        if len(env_ids) > 0:
            lengths = self.episode_length_buf[env_ids]
            extras["log"] = {
                "episode_return": self.return_sum[env_ids],
                "episode_length": lengths.float(),
                "episode_upright": self.upright_sum[env_ids] / lengths,
            }
            self.reset_idx(env_ids)
        return self.get_observations(), reward, time_outs.long(), extras


def make_runner(
    env: VecEnv, log_dir: str | None = None, algorithm: str = "PPO", device: str = "cpu"
) -> OnPolicyRunner:
    network = {
        "class_name": "MLPModel",
        "hidden_dims": [64, 64],
        "activation": "elu",
        "obs_normalization": True,
    }
    distribution = {"class_name": "GaussianDistribution", "init_std": 1.0}
    train_cfg = {
        "num_steps_per_env": 24,
        "save_interval": 50,
        "obs_groups": {"actor": ["policy"], "critic": ["critic"]},
        "actor": {**network, "distribution_cfg": distribution},
        "critic": network,
        "algorithm": {
            "class_name": algorithm,
            "gamma": 0.97,
            "entropy_coef": 0.002,
            "learning_rate": 1e-3,
            "schedule": "adaptive",
            "desired_kl": 0.01,
        },
    }
    return OnPolicyRunner(env, train_cfg, log_dir=log_dir, device=device)


@torch.inference_mode()
def evaluate(env: ArmEnv, policy: Any) -> dict[str, float]:
    """One episode of each robot."""
    obs = env.get_observations()
    for _ in range(env.max_episode_length):
        obs, _, _, extras = env.step(policy(obs))
    return {name: value.mean().item() for name, value in extras["log"].items()}


# What is measured.


def timed(env: VecEnv) -> Timed:
    """A step with precomputed actions, in CPU time."""
    actions = 2 * torch.rand(16, env.num_envs, 1) - 1
    env.episode_length_buf = torch.randint_like(env.episode_length_buf, 200)
    count = iter(range(10**9))

    @torch.inference_mode()
    def step() -> None:
        env.step(actions[next(count) % 16])

    return Timed(step, clock=time.process_time)


def loop(env: VecEnv, algorithm: str) -> dict[str, float]:
    """CPU time of an iteration, after one to warm up, in microseconds."""
    runner = make_runner(env, algorithm=algorithm)
    runner.learn(2, init_at_random_ep_len=True)
    start = time.process_time()
    runner.learn(ITERATIONS)
    return {"whole_us": (time.process_time() - start) * 1e6 / ITERATIONS}


def arm_step(num_envs: int, way: str) -> Timed:
    return timed(_arm(num_envs, way))


def arm_loop(num_envs: int, way: str) -> dict[str, float]:
    return loop(_arm(num_envs, way), "PPO")


def _arm(num_envs: int, way: str) -> ArmEnv:
    torch.manual_seed(0)
    env = ArmEnv(num_envs)
    if way == "compiled":
        env.physics = torch.compile(env.physics)
        env.measure = torch.compile(env.measure, dynamic=True)
        env.get_observations = torch.compile(env.get_observations)
    return env


def arm_learn(seed: int, num_envs: int = 4096, iterations: int = 60) -> dict[str, float]:
    """Trains and evaluates as examples/robot.py does."""
    torch.manual_seed(seed)
    runner = make_runner(ArmEnv(num_envs))
    runner.learn(iterations, init_at_random_ep_len=True)
    return evaluate(ArmEnv(100), runner.get_inference_policy())
