"""Trains on CartPole-v1 without velocities, exports the policy with its transforms, and plays it where only PyTorch is.

python examples/deploy.py                                   trains for some seconds, then plays five episodes in two ways

The velocities come from two stacked frames, and observations are normalized: both are in the exported file, with the frames as
inputs and outputs. A second process loads the file. It imports neither torchwrap nor Gymnasium, gets raw observations as lines
of JSON, and answers with actions.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


def serve(path: str) -> None:
    """The second process: what runs on the robot."""
    files = {"metadata.json": ""}
    policy = torch.export.load(path, extra_files=files).module()
    entries = json.loads(files["metadata.json"])["state"].items()
    state = {
        name: torch.zeros(1, *entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for name, entry in entries
    }
    for line in sys.stdin:
        message = json.loads(line)
        state["is_first"] = torch.tensor(
            [[message["is_first"]]]
        )  # the other entries start over with it
        action, state = policy(torch.tensor([message["observation"]]), state)
        print(json.dumps(action.tolist()[0]), flush=True)
    imported = {"torchwrap", "tensordict", "gymnasium"} & set(sys.modules)
    assert not imported, imported


@dataclass
class Args:
    seed: int = 1
    """seed of the environments and of PyTorch"""
    total_timesteps: int = 100_000
    """total number of env steps"""
    num_episodes: int = 5
    """number of episodes to play"""
    out: Path | None = None
    """folder of the results of the training, and of policy.pt2; None is a temporary one"""


def positions(observation: Tensor) -> Tensor:
    return observation[:, ::2]  # of the cart and of the pole


def main(args: Args) -> tuple[list[float], list[float]]:
    # Imported here, because the second process imports this file, too.
    import ppo
    from gymnasium.spaces import Box

    import torchwrap as tw
    from torchwrap import transforms as T

    def make(id: str, num_envs: int, **arguments: object) -> tw.Env:
        hidden = T.TransformObservation(positions, Box(-10, 10, (2,)))
        return tw.TransformedEnv(
            tw.make(id, num_envs, **arguments), hidden, T.FrameStackObservation(2)
        )

    folder = args.out or Path(tempfile.mkdtemp())
    flags = ppo.Args(
        seed=args.seed, total_timesteps=args.total_timesteps, normalize=True, out=folder
    )
    ppo.main(flags, make)
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    env = ppo.make_env(flags, 1, make)
    env.load_state_dict(checkpoint["env"])
    agent = ppo.Agent(env)
    agent.load_state_dict(checkpoint["agent"])

    def act(td):
        return agent.actor(td["observation"]).argmax(-1)

    # The whole of deployment.
    module = tw.deploy(env, act)
    program = torch.export.export(
        module, module.example_inputs(), dynamic_shapes=module.dynamic_shapes()
    )
    path = folder / "policy.pt2"
    torch.export.save(program, path, extra_files={"metadata.json": json.dumps(module.metadata)})
    print(json.dumps(module.metadata, indent=2))

    here = tw.evaluate(env, act, args.num_episodes, seed=args.seed + 1000)[
        "episode_return"
    ].tolist()
    there, total, is_first = [], 0.0, True
    bare = tw.make("CartPole-v1", 1)  # whose observations are raw
    td = bare.reset(seed=args.seed + 1000)
    command = [sys.executable, __file__, "--serve", str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        while len(there) < args.num_episodes:
            print(
                json.dumps({"observation": td["observation"][0].tolist(), "is_first": is_first}),
                file=process.stdin,
                flush=True,
            )
            transition, td = bare.step(torch.tensor([json.loads(process.stdout.readline())]))
            total, is_first = (
                total + transition["next", "reward"].item(),
                transition["next", "done"].item(),
            )
            if is_first:
                there.append(total)
                total = 0.0
        process.stdin.close()
        assert process.wait() == 0
    print(f"returns of tw.evaluate:         {here}\nreturns of the second process:  {there}")
    return here, there


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        import tyro

        main(tyro.cli(Args))
