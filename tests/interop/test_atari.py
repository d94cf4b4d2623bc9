"""Atari presets against the stacks that they are named after, over whole games."""

import ale_py
import cv2
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import (
    AtariPreprocessing,
    FrameStackObservation,
    ResizeObservation,
    TransformObservation,
)
from helpers import AT_RELEASES, load_example, mostly_full
from stable_baselines3.common import atari_wrappers as sb3
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecFrameStack,
)

import torchwrap as tw
from torchwrap import transforms as T

gymnasium.register_envs(ale_py)
atari_game = load_example("atari_game")
make_games = atari_game.make_games
FEW = [
    ("Breakout", 1),
    pytest.param("Breakout", 3, marks=pytest.mark.full),
]
MORE = [
    pytest.param(game, 3, marks=AT_RELEASES)
    for game in ("Pong", "SpaceInvaders", "Qbert", "Seaquest", "BeamRider")
]


def cleanrl(game: str) -> gymnasium.Env:
    """The wrappers of CleanRL's ppo_atari.py, with the grayscale of its version of Gymnasium."""
    env = gymnasium.make(f"{game}NoFrameskip-v4")
    env = sb3.EpisodicLifeEnv(sb3.MaxAndSkipEnv(sb3.NoopResetEnv(env, noop_max=30), skip=4))
    if "FIRE" in env.unwrapped.get_action_meanings():
        env = sb3.FireResetEnv(env)
    env = ResizeObservation(sb3.ClipRewardEnv(env), (84, 84))
    gray = gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)
    env = TransformObservation(env, lambda frame: cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY), gray)
    return FrameStackObservation(env, 4)


def gymnasium_stack(game: str) -> gymnasium.Env:
    return FrameStackObservation(
        AtariPreprocessing(gymnasium.make(f"ALE/{game}-v5", frameskip=1)), 4
    )


class StableBaselines3(gymnasium.Env):
    """The stack of `make_atari_env` and `VecFrameStack`, as a single env with channels first."""

    def __init__(self, game: str) -> None:
        env = sb3.AtariWrapper(gymnasium.make(f"{game}NoFrameskip-v4"))
        self.vec_env = VecFrameStack(DummyVecEnv([lambda: env]), 4)
        self.action_space = self.vec_env.action_space
        self.observation = None

    def reset(self, *, seed=None, options=None):
        if self.observation is None:
            self.vec_env.seed(seed)
            self.observation = self.vec_env.reset()
        return self.observation[0].transpose(2, 0, 1), {}

    def step(self, action):
        self.observation, reward, done, infos = self.vec_env.step([action])
        truncated = infos[0]["TimeLimit.truncated"]
        final = infos[0]["terminal_observation"] if done[0] else self.observation[0]
        return (
            final.transpose(2, 0, 1),
            reward[0],
            done[0] and not truncated,
            truncated,
            {},
        )


TRAINING = {"episodic_life": True, "reward_clip": True}
REFERENCES = {
    "cleanrl": (cleanrl, TRAINING),
    "gymnasium": (gymnasium_stack, {"fire_reset": False, "repeat_action_probability": 0.25}),
    "sb3": (StableBaselines3, TRAINING),
}


@pytest.mark.full
@pytest.mark.parametrize("preset", mostly_full(REFERENCES, "cleanrl"))
@pytest.mark.parametrize(("game", "at_least"), FEW + MORE)
def test_preset_equals_its_reference_over_whole_games(
    game: str, preset: str, at_least: int
) -> None:
    make_reference, options = REFERENCES[preset]
    references = [make_reference(game) for _ in range(2)]
    env = make_games(game, 2, preset, **options)
    td = env.reset(seed=3)
    assert env.single_action_space == references[0].action_space
    for row, reference in enumerate(references):
        np.testing.assert_array_equal(td["observation"][row], reference.reset(seed=3 + row)[0])
    actions = np.random.default_rng(5)
    games = 0
    ends = 0
    for _ in range(20_000):
        action = actions.integers(env.single_action_space.n, size=2)
        transition, td = env.step(torch.from_numpy(action))
        successor = transition["next"]
        over = successor["info", "game_over"].squeeze(-1).bool()
        for row, reference in enumerate(references):
            observation, reward, terminated, truncated, _ = reference.step(action[row])
            given = [successor[name][row].item() for name in ("reward", "terminated", "truncated")]
            assert given == [reward, terminated, truncated]
            if over[row]:  # the references have frames of the action before in the last of the four
                np.testing.assert_array_equal(successor["observation"][row, :3], observation[:3])
            else:
                np.testing.assert_array_equal(successor["observation"][row], observation)
            if terminated or truncated:
                observation = reference.reset()[0]
            np.testing.assert_array_equal(td["observation"][row], observation)
        games += int(over.sum())
        ends += int(successor["done"].sum())
        if games >= at_least:
            break
    assert games >= at_least
    assert (ends > games) == (preset != "gymnasium" and game != "Pong")


def test_reset_by_hand_starts_a_new_game_in_the_rows_of_the_mask() -> None:
    env = make_games("Breakout", 2, "cleanrl", episodic_life=True)
    env.reset(seed=0)
    while True:
        successor, td = env.step(torch.tensor([2, 3]))
        if successor["next", "info", "lives"].min() < 5:
            break
    before = td["observation"].clone()
    lost = int(successor["next", "info", "lives"].argmin())
    td = env.reset(mask=torch.arange(2) == lost)
    assert torch.equal(td["observation"][1 - lost], before[1 - lost])
    transition, _ = env.step(torch.tensor([0, 0]))
    assert transition["next", "info", "lives"][lost] == 5


def test_truncated_game_ends_with_its_last_frame() -> None:
    options = {"max_num_frames_per_episode": 203, "repeat_action_probability": 0.0}
    env = atari_game.AtariGame("ALE/Pong-v5", noop_max=1, grayscale=True, **options)
    game = gymnasium.make(
        "ALE/Pong-v5",
        frameskip=1,
        obs_type="grayscale",
        repeat_action_probability=0.0,
    )
    env.reset(seed=4)
    game.reset(seed=4)
    frames = [game.step(0)[0] for _ in range(203)]
    for last in range(4, 201, 4):
        np.testing.assert_array_equal(env.step(0)[0], np.maximum(frames[last - 1], frames[last]))
    observation, _, terminated, truncated, info = env.step(0)
    np.testing.assert_array_equal(observation, frames[-1])
    assert truncated and not terminated and info["game_over"]


LIVES = {"episodic_life": True, "frame_skip": 1}
OTHERS = {"frame_skip": 2, "full_action_space": True, "reward_clip": True}
PAIRS = {
    "ale": ("ale", {"game": "Seaquest"}),  # whose rewards are 20
    "ale, others": ("ale", OTHERS),
    "ale, lives": ("ale", LIVES),
    "gymnasium, another game": ("gymnasium", {"game": "Seaquest", "fire_reset": False}),
    "sb3": ("sb3", {"fire_reset": False}),
    "sb3, lives": ("sb3", {"fire_reset": False, **LIVES}),
}


@pytest.mark.parametrize("name", mostly_full(PAIRS, "ale"))
def test_games_of_backends_agree_with_those_of_envpool_frame_by_frame(name):
    pytest.importorskip("envpool")
    backend, options = PAIRS[name]
    options = {"game": "Breakout", "noop_max": 1, "stack_num": 1, **options}  # others are drawn
    games = make_games(num_envs=1, backend=backend, **options)
    pool = make_games(num_envs=1, backend="envpool", seed=0, **options)
    assert games.single_action_space == pool.single_action_space
    roots = [games.reset(seed=0), pool.reset(seed=0)]
    actions = np.random.default_rng(0)
    num_games = 0
    num_ends = 0
    while num_games < 2:
        torch.testing.assert_close(*[dict(root.exclude("info").items()) for root in roots])
        action = torch.from_numpy(actions.integers(games.single_action_space.n, size=1))
        transitions, roots = zip(*[env.step(action) for env in (games, pool)], strict=True)
        theirs, ours = [transition["next"] for transition in transitions]
        for key in ("reward", "terminated", "truncated", ("info", "game_over"), ("info", "lives")):
            assert torch.equal(theirs[key], ours[key])
        over = theirs["info", "game_over"].item()
        if not over:  # a game may end within an action
            assert torch.equal(theirs["observation"], ours["observation"])
            if name == "ale, lives" and theirs["done"]:  # after a lost life, EnvPool plays FIRE
                roots = [games.step(torch.tensor([1]))[1], roots[1]]
        num_games += over
        num_ends += int(theirs["done"])
    assert (num_ends > num_games) == ("lives" in name)


def test_games_of_envpool_are_limited_by_frames():
    pytest.importorskip("envpool")
    games = make_games("Pong", 1, "envpool", frame_skip=2)
    assert games.signature.max_episode_steps == 54_000


@pytest.mark.parametrize("backend", mostly_full(["ale", "envpool", "sb3"], "ale"))
def test_whole_games_end_with_the_game_and_are_those_of_the_lives(backend):
    if backend == "envpool":
        pytest.importorskip("envpool")
    envs = [make_games("Breakout", 2, backend, seed=3, episodic_life=True) for _ in range(2)]
    lives, whole = [tw.TransformedEnv(env, atari_game.GameReturn()) for env in envs]
    whole = atari_game.WholeGames(whole)
    roots = [lives.reset(seed=3), whole.reset(seed=3)]
    actions = np.random.default_rng(0)
    scores = []
    while len(scores) < 3:
        action = torch.from_numpy(actions.integers(4, size=2))
        transitions, roots = zip(*[env.step(action) for env in (lives, whole)], strict=True)
        torch.testing.assert_close(*[root["observation"] for root in roots])
        theirs, ours = [transition["next"] for transition in transitions]
        over = ours["done"].flatten()
        assert torch.equal(over, theirs["info", "game_over"].flatten() > 0)
        scores += ours["episode_return"][over].flatten().tolist()
    for env in (lives, whole):
        assert atari_game.GameReturn.of(env)[0].return_queue.tolist() == scores


UNFIT = {"noop_max": {"noop_max": 0}, "backend": {"backend": "dqn"}, "game": {"game": "CartPole"}}


@pytest.mark.parametrize("name", UNFIT)
def test_make_games_with_an_invalid_argument_raises_with_its_name(name) -> None:
    with pytest.raises(ValueError, match=f"make_games: {name}"):
        make_games(**{"game": "Pong", "num_envs": 1, **UNFIT[name]})


def test_preset_on_an_env_without_frames_raises() -> None:
    with pytest.raises(TypeError, match="ResizeObservation"):
        tw.TransformedEnv(tw.make("CartPole-v1"), T.atari("gymnasium"))


@pytest.mark.parametrize("frameskip", [4, (2, 5)], ids=["4", "2 to 5"])
def test_skipping_frames_of_a_game_that_skips_raises(frameskip):
    env = tw.make("ale_py:ALE/Pong-v5", 1, frameskip=frameskip)
    with pytest.raises(ValueError, match="frameskip"):
        tw.wrappers.MaxAndSkipObservation(env)
