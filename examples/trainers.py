"""PPO of three libraries on torchwrap's envs, through the adapters of `torchwrap.interop`.

python examples/trainers.py torchrl         Collector, GAE and ClipPPOLoss, on CartPole-v1
python examples/trainers.py skrl            PPO and SequentialTrainer, on CartPole-v1
python examples/trainers.py rl_games        Runner, on Pendulum-v1

rsl_rl's is robot.py, Stable-Baselines3's sb3_callbacks.py.

Each library has one function, to copy. It returns the torchwrap env that it has trained on, and a
policy for `tw.evaluate`. `main` plays 64 greedy episodes in the same stack, with the statistics
that its transforms have learned.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import tempfile
from pathlib import Path

import torch
from torch import nn

import torchwrap as tw
from torchwrap import transforms as T

Trained = tuple[tw.Env, tw.policy.Policy]

# On CartPole-v1: the hyperparameters of ppo.py, with a learning rate that falls to zero
NUM_ENVS = 64
NUM_STEPS = 32
BATCH_SIZE = NUM_ENVS * NUM_STEPS
MINIBATCH_SIZE = 512
EPOCHS = 8
LEARNING_RATE = 3e-3
GAMMA = 0.98
GAE_LAMBDA = 0.95


def make_cartpole() -> tw.Env:
    env = tw.make("CartPole-v1", NUM_ENVS)
    return tw.TransformedEnv(env, T.RecordEpisodeStatistics(), T.NormalizeObservation())


def mlp(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(num_inputs, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, num_outputs),
    )


def train_torchrl(seed: int, num_updates: int = 73) -> Trained:
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    from torchwrap.interop.torchrl import to_torchrl

    env = make_cartpole()
    base = to_torchrl(env)
    base.set_seed(seed)  # before the collector, which resets
    module = TensorDictModule(mlp(4, 2), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(
        module,
        in_keys=["logits"],
        spec=base.action_spec,
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(mlp(4, 1), in_keys=["observation"])
    advantage = GAE(gamma=GAMMA, lmbda=GAE_LAMBDA, value_network=critic)
    loss_module = ClipPPOLoss(
        actor,
        critic,
        entropy_coeff=0.0,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    optimizer = torch.optim.Adam(loss_module.parameters(), eps=1e-5)
    collector = Collector(
        base,
        actor,
        frames_per_batch=BATCH_SIZE,
        total_frames=BATCH_SIZE * num_updates,
        auto_register_policy_transforms=False,  # no InitTracker: nothing is recurrent
    )
    for update, data in enumerate(collector):  # data["next", "observation"] is the true successor
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - update / num_updates)
        with torch.no_grad():
            advantage(data)
        flat = data.reshape(-1)
        order = torch.cat([torch.randperm(BATCH_SIZE) for _ in range(EPOCHS)])
        for rows in order.split(MINIBATCH_SIZE):
            losses = loss_module(flat[rows])
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"]).backward()
            nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
            optimizer.step()
    return env, lambda td: actor.get_dist(td).mode


def train_skrl(seed: int, num_updates: int = 73) -> Trained:
    from skrl.agents.torch.ppo import PPO
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
    from skrl.trainers.torch import SequentialTrainer, SequentialTrainerCfg
    from skrl.utils import set_seed

    from torchwrap.interop.skrl import to_skrl, true_successors

    class Policy(CategoricalMixin, Model):
        def __init__(self, **spaces):
            Model.__init__(self, **spaces)
            CategoricalMixin.__init__(self)
            self.net = mlp(self.num_observations, self.num_actions)

        def compute(self, inputs, role):
            return self.net(inputs["observations"]), {}

    class Value(DeterministicMixin, Model):
        def __init__(self, **spaces):
            Model.__init__(self, **spaces)
            DeterministicMixin.__init__(self)
            self.net = mlp(self.num_observations, 1)

        compute = Policy.compute

    set_seed(seed)  # the env's first reset takes it too
    env = make_cartpole()
    skrl_env = to_skrl(env)
    spaces = {
        "observation_space": skrl_env.observation_space,
        "action_space": skrl_env.action_space,
        "device": skrl_env.device,
    }
    schedule = {"lr_lambda": lambda epoch: 1 - epoch / (num_updates * EPOCHS)}
    cfg = {
        "rollouts": NUM_STEPS,
        "learning_epochs": EPOCHS,
        "mini_batches": BATCH_SIZE // MINIBATCH_SIZE,
        "discount_factor": GAMMA,
        "gae_lambda": GAE_LAMBDA,
        "learning_rate": LEARNING_RATE,
        "learning_rate_scheduler": torch.optim.lr_scheduler.LambdaLR,
        "learning_rate_scheduler_kwargs": schedule,
        "time_limit_bootstrap": True,
        "value_loss_scale": 0.5,
        "value_clip": 0.0,  # skrl's default suits values near 1
        "experiment": {"write_interval": 0, "checkpoint_interval": 0},
    }
    memory = RandomMemory(memory_size=NUM_STEPS, num_envs=NUM_ENVS, device=skrl_env.device)
    models = {"policy": Policy(**spaces), "value": Value(**spaces)}
    agent = true_successors(PPO(models=models, memory=memory, cfg=cfg, **spaces), skrl_env)
    trainer_cfg = SequentialTrainerCfg(
        timesteps=NUM_STEPS * num_updates,
        headless=True,
        disable_progressbar=True,
        close_environment_at_exit=False,
    )
    SequentialTrainer(cfg=trainer_cfg, env=skrl_env, agents=agent).train()
    policy = models["policy"]
    return env, lambda td: policy.net(td["observation"]).argmax(-1)


def train_rl_games(seed: int, num_updates: int = 40) -> Trained:
    from rl_games.torch_runner import Runner

    from torchwrap.interop.rl_games import register

    def make_pendulum(num_envs: int) -> tw.Env:
        return tw.TransformedEnv(tw.make("Pendulum-v1", num_envs), T.NormalizeObservation())

    register("pendulum", make_pendulum)
    default = {"name": "default"}
    continuous = {
        "mu_activation": "None",
        "mu_init": default,
        "sigma_activation": "None",
        "sigma_init": {"name": "const_initializer", "val": 0},
        "fixed_sigma": True,
    }
    network = {
        "name": "actor_critic",
        "separate": True,
        "space": {"continuous": continuous},
        "mlp": {"units": [64, 64], "activation": "tanh", "initializer": default},
    }
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "env_name": "pendulum",
            "env_config": {},  # the Runner seeds an env with an env_config
            "num_actors": 256,
            "name": "pendulum",
            "full_experiment_name": "run",
            "train_dir": folder,
            "save_best_after": 1000,
            "device": "cpu",
            "device_name": "cpu",
            "torch_compile": False,
            "print_stats": False,
            "max_epochs": num_updates,
            "horizon_length": 32,
            "minibatch_size": 2048,
            "mini_epochs": 5,
            "gamma": 0.95,
            "tau": 0.95,
            "learning_rate": 1e-3,
            "lr_schedule": "adaptive",
            "schedule_type": "standard",
            "kl_threshold": 0.01,
            "e_clip": 0.2,
            "clip_value": False,
            "critic_coef": 1,
            "entropy_coef": 0.0,
            "bounds_loss_coef": 0.0,
            "truncate_grads": True,
            "grad_norm": 1.0,
            "reward_shaper": {"scale_value": 0.1},
            "value_bootstrap": True,
            # The env has NormalizeObservation, whose statistics are in the checkpoint too.
            "normalize_input": False,
            "normalize_value": True,
            "normalize_advantage": True,
        }
        params = {
            "seed": seed,
            "torch_threads": 1,
            "config": config,
            "algo": {"name": "a2c_continuous"},
            "model": {"name": "continuous_a2c_logstd"},
            "network": network,
        }
        runner = Runner()
        runner.load({"params": params})
        runner.run({"train": True})
        player = runner.create_player()
        (checkpoint,) = Path(folder, "run", "nn").glob("last_*")
        player.restore(str(checkpoint))
    player.has_batch_dimension = True
    return player.env.env, lambda td: player.get_action(td["observation"], is_deterministic=True)


LIBRARIES = {"torchrl": train_torchrl, "skrl": train_skrl, "rl_games": train_rl_games}


def main(library: str, seed: int = 1, num_updates: int | None = None) -> float:
    train = LIBRARIES[library]
    if importlib.util.find_spec(library) is None:
        command = f'pip install -e ".[{library.replace("_", "-")}]"'
        raise SystemExit(f"trainers.py: {library} must be installed. Run {command}.")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    # Some libraries print a page per update.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        env, policy = train(seed) if num_updates is None else train(seed, num_updates)
    test_env = tw.make(env.spec, num_envs=64)
    test_env.load_state_dict(env.state_dict())
    episodes = tw.evaluate(test_env, policy, 64, seed=seed + 1000)
    mean = episodes["episode_return"].mean().item()
    print(f"{library}: mean return {mean:.0f} of 64 episodes")
    return mean


if __name__ == "__main__":
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--seed", type=int, default=1, help="seed of the envs and of PyTorch")
    parser.add_argument("--num-updates", type=int, help="defaults to those that solve the env")
    main(**vars(parser.parse_args()))
