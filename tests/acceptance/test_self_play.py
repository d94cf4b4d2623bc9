"""examples/self_play.py: Connect Four, its pool of opponents, and ratings."""

import json

import ppo
import ppo_output
import pytest
import self_play
import torch
from helpers import assert_same_files

import torchwrap as tw
from torchwrap.testing import check_env


@pytest.fixture
def game():
    return self_play.ConnectFour()


@pytest.mark.long
@pytest.mark.full
def test_connect_four_keeps_the_contract():
    check_env(lambda num_envs, **words: tw.make("ConnectFour-v0", num_envs, **words))


def board_of(*rows):
    """Rows from the top; X are the agent's pieces. A board begins at the bottom."""
    values = {".": 0.0, "X": 1.0, "O": -1.0}
    cells = [[values[each] for each in row] for row in reversed(rows)]
    return torch.tensor(cells + [[0.0] * 7] * (6 - len(rows)))


@pytest.mark.parametrize(
    ("rows", "winner"),
    [
        pytest.param(["...XXXX"], 1, id="row"),
        pytest.param(["O......"] * 4, -1, id="column"),
        pytest.param(["...X...", "..XO...", ".XOO...", "XOOO..."], 1, id="rising"),
        pytest.param(["O......", "XO.....", "XXO....", "XXXO..."], -1, id="falling"),
        pytest.param(["X.....X", "XX...XX"], 0, id="across the edge"),
    ],
)
def test_four_in_a_row_win(game, rows, winner):
    board = board_of(*rows)
    assert game.wins(board, 1) - game.wins(board, -1) == winner


def test_piece_falls_on_those_of_its_column(game):
    board = game.drop(board_of("..X....", "..O...."), torch.tensor(2), -1)
    assert board.equal(board_of("..O....", "..X....", "..O...."))
    full = board_of(*["O......"] * 6)
    assert game.drop(full, torch.tensor(0), 1).equal(full)


def test_opponent_of_env_i_is_member_i_of_the_pool(game):
    env = tw.FunctionalEnv(game, 64)
    with torch.no_grad():
        for member in range(8):  # whose favorite column is its index
            game.pool[-1].bias[member, member % 7] = 1e9
    env.reset(seed=0)
    transition, _ = env.step(torch.full((64,), 6))
    boards = transition["next", "observation", "observation"].view(8, 8, 6, 7)
    for member in range(8):
        replies = (boards[:, member] == -1).sum(1)
        assert (replies[:, member % 7] > 0).all() and (replies > 0).sum() == 8


def test_frozen_actor_takes_the_place_of_the_oldest_member_and_the_first_stays(game):
    actor = ppo.mlp(self_play.flatten_space(game.observation_space), 7, 1.0, 64)
    for iteration in range(8):
        game.freeze(actor, iteration)
    assert game.iterations.tolist() == [-1, 7, 1, 2, 3, 4, 5, 6]
    assert not game.pool[4].weight[0].any()
    assert game.pool[4].weight[5].equal(actor[4].weight)


def test_elo_is_400_log_10_of_the_odds():
    points = torch.tensor([[0.0, 24.5, 9.5], [74.5, 0.0, 24.5], [89.5, 74.5, 0.0]])
    expected = 400 * torch.tensor([1.0, 3.0, 9.0], dtype=torch.float64).log10()
    torch.testing.assert_close(self_play.elo(points.double()), expected)


@pytest.mark.full
def test_member_that_fills_a_column_is_rated_above_those_that_play_at_random(registry):
    env = ppo.make_env(ppo.Args("ConnectFour-v0"), 64)
    game = env.unwrapped.func_env
    with torch.no_grad():
        game.pool[-1].bias[5, 3] = 1e9
    ratings = self_play.rate(game, env, ppo.Agent(env)).tolist()
    assert ratings.pop(5) > 150
    assert max(map(abs, ratings)) < 60


@pytest.mark.full
def test_killed_self_play_continues_with_its_pool(tmp_path, monkeypatch):
    monkeypatch.setattr(self_play, "FREEZE_EVERY", 1)
    monkeypatch.setattr(self_play, "rate", lambda *_: torch.zeros(8))

    def train(name):
        short = dict(total_timesteps=1_024, num_envs=16, resume=True)
        self_play.main(ppo.Args("ConnectFour-v0", out=tmp_path / name, **short))
        ratings = json.loads((tmp_path / name / "ratings.json").read_text())
        assert [iteration for iteration, _ in ratings] == [-1, -1, -1, -1, -1, 0, 1, 2]
        checkpoint = torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        return {"ratings": ratings, **checkpoint}

    whole = train("whole")
    save = ppo_output.Checkpoint.save

    def save_first(checkpoint, processes):
        if not checkpoint.path.exists():
            save(checkpoint, processes)

    with monkeypatch.context() as patch:  # as if killed after the first checkpoint
        patch.setattr(ppo_output.Checkpoint, "save", save_first)
        train("killed")
    assert_same_files(train("killed"), whole)
