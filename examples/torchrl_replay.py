"""DQN of TorchRL on a torchwrap env: its Collector, replay buffer and DQNLoss.

python examples/torchrl_replay.py                           CartPole-v1
python examples/torchrl_replay.py --total-frames 100000     training for longer

Only `make_env` and the evaluation use torchwrap; the rest is TorchRL's. Needs the extras `examples`
and `torchrl`.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import torch
import tyro
from ppo import Flags
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.interop.torchrl import to_torchrl


@dataclass
class Args(Flags):
    env_id: str = "CartPole-v1"
    """the id of the environment, with discrete actions"""
    seed: int = 1
    """seed of the environments and of PyTorch"""
    num_envs: int = 32
    """number of parallel environments"""
    num_steps: int | None = None
    """number of steps of each environment per collection; None makes 128 of all"""
    total_frames: int = 25_600
    """total number of env steps"""
    learning_starts: int = 1_024
    """number of env steps with random actions before the first gradient step"""
    updates_per_collection: int = 16
    """number of gradient steps after each collection"""
    buffer_size: int = 50_000
    """number of transitions in the replay buffer"""
    batch_size: int = 128
    """number of transitions per gradient step"""
    learning_rate: float = 2.5e-3
    """learning rate of the optimizer, annealed linearly to zero"""
    gamma: float = 0.98
    """discount factor"""
    tau: float = 0.02
    """update rate of the target network"""
    end_e: float = 0.05
    """probability of a random action after a fifth of total_frames; it starts at 1"""
    num_eval_episodes: int = 16
    """number of evaluation episodes"""

    def __post_init__(self) -> None:
        if self.num_steps is None:  # as many updates per env step for any number of envs
            self.num_steps = max(1, 128 // self.num_envs)


def make_env(args: Args, num_envs: int) -> tw.Env:
    return tw.TransformedEnv(tw.make(args.env_id, num_envs), T.RecordEpisodeStatistics())


def main(args: Args) -> dict[str, float]:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    env = to_torchrl(make_env(args, args.num_envs))  # an EnvBase
    env.set_seed(args.seed)  # before the collector is made, because that resets

    num_inputs = env.observation_spec["observation"].shape[-1]
    action_spec = env.action_spec_unbatched  # of one env: the modules below draw for any batch
    network = MLP(num_inputs, action_spec.n, num_cells=[120, 84], activation_class=torch.nn.ReLU)
    policy = QValueActor(network, spec=action_spec, action_space="categorical")
    annealing = args.total_frames // 5
    exploration = EGreedyModule(action_spec, annealing_num_steps=annealing, eps_end=args.end_e)
    loss_module = DQNLoss(policy, loss_function="l2", delay_value=True, action_space="categorical")
    loss_module.make_value_estimator(gamma=args.gamma)
    updater = SoftUpdate(loss_module, tau=args.tau)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=args.learning_rate)
    storage = LazyTensorStorage(args.buffer_size)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=args.batch_size)

    collector = Collector(
        env,
        TensorDictSequential(policy, exploration),
        frames_per_batch=args.num_envs * args.num_steps,
        total_frames=args.total_frames,
        init_random_frames=args.learning_starts,
        auto_register_policy_transforms=False,  # no InitTracker: nothing is recurrent
    )
    num_frames = 0
    returns = []
    # Where an episode ended, ("next", "observation") is its final observation.
    for data in collector:
        num_frames += data.numel()
        exploration.step(data.numel())
        buffer.extend(data.reshape(-1))
        remaining = 1 - num_frames / args.total_frames
        optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
        learns = num_frames >= args.learning_starts
        for _ in range(learns * args.updates_per_collection):
            loss = loss_module(buffer.sample())["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            updater.step()
        returns += data["next", "episode_return"][data["next", "done"]].tolist()
        if num_frames % 5_120 == 0 and returns:
            mean = fmean(returns[-50:])
            print(f"{num_frames} frames: mean return {mean:.0f} of the latest 50 episodes")
    collector.shutdown()

    test_env = make_env(args, args.num_eval_episodes)
    seed = args.seed + 1_000
    episodes = tw.evaluate(test_env, policy, args.num_eval_episodes, seed=seed)  # greedy
    mean_return = episodes["episode_return"].mean().item()
    print(f"evaluation: mean return {mean_return:.0f} of {len(episodes)} episodes")
    return {"frames": num_frames, "mean_return": mean_return}


if __name__ == "__main__":
    main(tyro.cli(Args))
