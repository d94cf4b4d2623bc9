from __future__ import annotations

import torch

import torchwrap as tw
from torchwrap import masks
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv


def test_a_mask_that_was_looked_up_is_looked_at_no_more():
    mask = torch.tensor([True, False, True])
    assert masks.look_up(mask).tolist() == masks.rows(mask).tolist() == [0, 2]
    assert masks.rows(mask) is masks.look_up(mask)


def test_whether_a_mask_is_set_anywhere():
    mask = torch.zeros(4, 1, dtype=torch.bool)
    assert not masks.any(mask)
    mask[2] = True
    assert masks.any(mask)


def test_a_mask_of_ones_own_is_looked_at_each_time_for_it_may_have_changed():
    env = tw.TransformedEnv(ScriptedEnv(3, (1,), None), T.NormalizeObservation(), T.FrameStackObservation(2))
    env.reset()
    mask = torch.tensor([True, False, False])
    for row in range(3):
        env.step(env.reset(mask=mask).set("action", env.sample_action()))
        mask.copy_(torch.arange(3) == row)
        assert env.reset(mask=mask)["observation"].diff(dim=1).flatten().eq(0).tolist() == mask.tolist()


def test_a_function_of_few_rows_gets_those_alone():
    mask, value, seen = torch.tensor([False, True, False, True]), torch.arange(8.0).view(4, 2), []
    given = masks.only(mask, value, lambda rows: seen.append(len(rows)) or rows.sum(1, keepdim=True))
    assert (seen, given.tolist()) == ([2], [[0], [5], [0], [13]])
