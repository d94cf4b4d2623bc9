"""Exports a policy with its transforms, and plays it in a process that imports only PyTorch.

python examples/deploy.py           trains for some seconds, then plays five episodes in two ways

The policy plays CartPole-v1 without velocities. These come from two stacked frames, and
observations are normalized: both are in the exported file, with the frames as inputs and outputs. A
second process loads the file. It imports neither torchwrap nor Gymnasium, gets raw observations as
lines of JSON, and answers with actions.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def serve(path: str) -> None:
    """The second process, as on a robot."""
    files = {"metadata.json": ""}
    policy = torch.export.load(path, extra_files=files).module()
    state = {}
    for name, entry in json.loads(files["metadata.json"])["state"].items():
        dtype = getattr(torch, entry["dtype"])
        state[name] = torch.zeros(1, *entry["shape"], dtype=dtype)
    for line in sys.stdin:
        message = json.loads(line)
        state["is_first"] = torch.tensor([[message["is_first"]]])  # resets the other entries
        action, state = policy(torch.tensor([message["observation"]]), state)
        print(json.dumps(action.tolist()[0]), flush=True)
    imported = {"torchwrap", "tensordict", "gymnasium"} & set(sys.modules)
    assert not imported, imported


def positions(observation: Tensor) -> Tensor:
    return observation[:, ::2]  # of the cart and of the pole


def main(args: Any, num_episodes: int = 5) -> tuple[list[float], list[float]]:
    # Imported here, because the second process imports this file, too.
    import ppo
    import ppo_output
    from gymnasium.spaces import Box

    import torchwrap as tw
    from torchwrap import transforms as T

    def make(id: str, num_envs: int, **arguments: object) -> tw.Env:
        env = tw.make(id, num_envs, **arguments)
        hide = T.TransformObservation(positions, Box(-10, 10, (2,)))
        return tw.TransformedEnv(env, hide, T.FrameStackObservation(2))

    ppo.main(args, make)
    env, agent = ppo_output.load(args, make=make)

    def act(td):
        return agent.actor(td["observation"]).argmax(-1)

    # Deployment
    deployed = tw.deploy(env, act)
    path = args.out / "policy.pt2"
    metadata = json.dumps(deployed.metadata, indent=2)
    torch.export.save(deployed.program, path, extra_files={"metadata.json": metadata})
    print(metadata)

    episodes = tw.evaluate(env, act, num_episodes, seed=args.seed + 1000)
    here = episodes["episode_return"].tolist()
    there = []
    total = 0.0
    is_first = True
    raw_env = tw.make("CartPole-v1", 1)
    td = raw_env.reset(seed=args.seed + 1000)
    command = [sys.executable, __file__, "--serve", str(path)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **pipes) as process:
        while len(there) < num_episodes:
            message = {"observation": td["observation"][0].tolist(), "is_first": is_first}
            print(json.dumps(message), file=process.stdin, flush=True)
            action = json.loads(process.stdout.readline())
            transition, td = raw_env.step(torch.tensor([action]))
            total += transition["next", "reward"].item()
            is_first = transition["next", "done"].item()
            if is_first:
                there.append(total)
                total = 0.0
        process.stdin.close()
        assert process.wait() == 0
    print(f"returns of tw.evaluate:         {here}")
    print(f"returns of the second process:  {there}")
    return here, there


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        import ppo
        import tyro

        settings = dict(total_timesteps=100_000, normalize=True, out=Path("runs/deploy"))
        main(tyro.cli(ppo.Args, default=ppo.Args(**settings)))
