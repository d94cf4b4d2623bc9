"""Self-play: PPO learns Connect Four against a pool of its own frozen earlier selves.

python examples/self_play.py    writes ratings.json; if it was killed, it continues

A step is a move of each player: the opponent, whose pieces are -1, moves in the env's `transition`.
The pool is part of the env, so checkpoints hold it. Flags are those of ppo.py's functions.
"""

import json
from functools import partial

import ppo
import torch
import tyro
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, flatten_space
from ppo_output import Checkpoint
from torch import nn, optim
from torch.func import functional_call, stack_module_state

import torchwrap as tw
from torchwrap import random

POOL_SIZE = 8  # Env i plays against member i % 8. The first one plays at random.
FREEZE_EVERY = 10  # iterations
PPO = dict(total_timesteps=10**6, num_envs=256, learning_rate=1e-3, ent_coef=0.01, resume=True)
ARGS = ppo.Args("ConnectFour-v0", out="runs/self-play", **PPO)
CELLS = torch.arange(42).view(6, 7)
SQUARES = CELLS.unfold(0, 4, 1).unfold(1, 4, 1)
DIAGONALS = [SQUARES.diagonal(0, 2, 3), SQUARES.flip(3).diagonal(0, 2, 3)]
LINES = [CELLS.unfold(0, 4, 1), CELLS.unfold(1, 4, 1), *DIAGONALS]  # of four


class ConnectFour(nn.Module, FuncEnv):
    action_space = Discrete(7)
    observation_space = Dict(action_masks=MultiBinary(7), observation=Box(-1, 1, (42,)))

    def __init__(self):
        super().__init__()
        self.register_buffer("cells", CELLS)
        self.register_buffer("lines", torch.cat([cells.reshape(-1, 4) for cells in LINES]))
        self.register_buffer("iterations", torch.full((POOL_SIZE,), -1))  # when each was frozen
        self.pool = ppo.mlp(flatten_space(self.observation_space), 7, 0.0, 64)  # 0: at random
        for layer in self.pool[::2]:
            for name, weights in stack_module_state([layer] * POOL_SIZE)[0].items():
                setattr(layer, name, nn.Parameter(weights.detach(), requires_grad=False))

    def freeze(self, actor, iteration):
        """Copies the actor into the place of the oldest member."""
        member = 1 + self.iterations[1:].argmin()
        self.iterations[member] = iteration
        for pool, weights in zip(self.pool.parameters(), actor.parameters(), strict=True):
            pool[member] = weights.detach()

    def drop(self, board, column, piece):
        height = (board != 0).sum(0)[column[None]]
        return torch.where(self.cells == 7 * height + column, piece, board)

    def wins(self, board, piece):
        return (board.flatten()[self.lines] == piece).all(-1).any().float()

    def observation(self, state, rng):
        board = state["board"]
        return {"action_masks": (board[-1] == 0).to(torch.int8), "observation": board.flatten()}

    def reply(self, board, rng):
        masks, cells = self.observation({"board": -board}, rng).values()
        member = rng.env[None] % POOL_SIZE  # not a scalar, because of PyTorch 2.7's vmap
        weights = {name: pool[member][0] for name, pool in self.pool.named_parameters()}
        logits = functional_call(self.pool, weights, torch.cat([masks, cells]))
        gumbel = -random.exponential(rng, shape=(7,)).log()
        scores = torch.where(masks > 0, logits + gumbel, -torch.inf)
        return self.drop(board, scores.argmax(), -1)

    def initial(self, rng):
        board = torch.zeros(6, 7, device=rng.env.device)
        board = torch.where(random.uniform(rng.fold_in(1)) < 0.5, board, self.reply(board, rng))
        return {"board": board, "result": torch.zeros_like(board[0, 0])}

    def transition(self, state, action, rng):
        board = self.drop(state["board"], action, 1)
        won = self.wins(board, 1)
        board = torch.where(won > 0, board, self.reply(board, rng))
        return {"board": board, "result": won - self.wins(board, -1)}

    def reward(self, state, action, next_state, rng):
        return next_state["result"]

    def terminal(self, state, rng):
        return (state["result"] != 0) | (state["board"] != 0).all()


tw.register("ConnectFour-v0", ConnectFour)


def elo(points):
    """Ratings of maximum likelihood (Zermelo, 1929) from points `(n, n)`; the first is 0."""
    points = (points + 0.5).fill_diagonal_(0)  # one more draw each: ratings are finite
    strength = torch.ones(len(points), dtype=torch.float64)
    for _ in range(1_000):
        games = (points + points.T) / (strength + strength.unsqueeze(-1))
        strength = points.sum(1) / games.sum(1)
    return 400 * (strength / strength[0]).log10()


def rate(game, env, agent):
    """Ratings of the pool's members, each of which plays as the agent against all."""
    points = torch.zeros(POOL_SIZE, POOL_SIZE, dtype=torch.float64)
    for member in range(POOL_SIZE):
        for weights, pool in zip(agent.actor.parameters(), game.pool.parameters(), strict=True):
            weights.data.copy_(pool[member])
        games = tw.evaluate(env, agent.act, 4 * env.num_envs)
        won = (games["episode_return"].double() + 1) / 2  # A draw is half a point
        points[member].index_add_(0, games["env_index"] % POOL_SIZE, won)
        points[:, member].index_add_(0, games["env_index"] % POOL_SIZE, 1 - won)
    return elo(points)


def main(args):
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.num_threads)
    ppo.fill_in(args)
    env = ppo.make_env(args, args.num_envs)
    game = env.unwrapped.func_env
    agent = ppo.Agent(env).to(args.device)
    optimizer = optim.Adam(agent.parameters(), args.learning_rate)
    collect = ppo.make_collector(env, agent, args)
    train = partial(ppo.train_minibatch, agent, optimizer, args, ppo.compute_gradients)
    env.reset(seed=args.seed)
    returns = []
    parts = {"agent": agent, "optimizer": optimizer, "returns": returns}
    checkpoint = Checkpoint(args, env, args.out, parts)  # with the pool, in a snapshot of the env
    checkpoint.load()
    num_iterations = -(-args.total_timesteps // (args.num_envs * args.num_steps))
    for iteration in range(len(returns), num_iterations):
        if iteration % FREEZE_EVERY == 0:
            game.freeze(agent.actor, iteration)
        data = collect()
        ppo.update(ppo.make_batch(agent, data.to_dict(), args), args, train)
        returns.append(data["next", "reward"][data["next", "done"]].mean().item())
        print(f"iteration {iteration}: mean return {returns[-1]:.2f} against the pool")
        checkpoint.save([checkpoint.process_state()])
    game.freeze(agent.actor, num_iterations)
    ratings = sorted(zip(game.iterations.tolist(), rate(game, env, agent).round().tolist()))
    print(f"Elo of the members, by the iteration that froze them: {ratings}")
    (args.out / "ratings.json").write_text(json.dumps(ratings))


if __name__ == "__main__":
    main(tyro.cli(ppo.Args, default=ARGS))
