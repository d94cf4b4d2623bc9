"""Every wrong argument of a transform, and every space that it does not fit: what is needed, and what came."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap.testing import ScriptedEnv

INF, NAN = math.inf, math.nan


def images(*shape, low=0, high=255, dtype=np.uint8):
    return spaces.Box(low, high, shape, dtype)


def stack(padding):
    return T.FrameStackObservation(2, padding_type=padding)


GRAY, COLOR, FLOATS, BYTES = images(4, 4), images(4, 4, 3), images(4, 4, 3, high=1, dtype=np.float32), images(3)
FREE, FINITE, HALF = spaces.Box(-INF, INF, (3,)), spaces.Box(0, 40, (3,)), spaces.Box(0, INF, (3,))
FLAT, SCALAR = spaces.Box(np.float32([0, 1, 0]), np.float32([1, 1, 1])), spaces.Box(-9, 9, ())
WHOLE, COUNT = images(3, low=-5, high=5, dtype=int), spaces.Discrete(3)
BOOLS, WIDE = images(3, high=1, dtype=bool), images(3, low=-3e38, high=3e38, dtype=np.float32)
DOUBLES, HALVES = images(3, high=40, dtype=np.float64), images(3, high=1, dtype=np.float16)
BITS, GRID = spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3])
DICT, PAIR = spaces.Dict(kind=COUNT, place=FINITE), spaces.Tuple([COUNT, FINITE])
NO_BOX = (COUNT, BITS, GRID, DICT, PAIR)
NO_FLOATS = (*NO_BOX, WHOLE, BYTES)
NO_IMAGE = (*NO_FLOATS, FREE, FLOATS, images(1, 4, 4, 3), images(4, 4, low=1), images(4, 4, high=9), images(4, 4, dtype=int))

# What is wrong where something is needed: the error, and the values.
INTEGER = {TypeError: (None, "3", b"3", 2.0, np.float32(2), NAN, 1j, np.True_, {3}, int, torch.tensor(2.0), torch.ones(2))}
INTEGER[TypeError] += (torch.tensor(True), torch.tensor([3]), np.array(True), np.timedelta64(3), bytearray(b"3"))
SIZE = {TypeError: (*INTEGER[TypeError], [3], (3,))}
NATURAL = {ValueError: (0, -7, np.int64(0), True)}
TOO_LARGE = {ValueError: (2**63, 2**70, 10**30)}
FLAG = {TypeError: (None, 0, 1, 1.0, "yes", [True], np.True_, torch.tensor(True))}
NO_NUMBER = ("0.5", [0.5], (0.5,), {}, 1j, True, int, torch.zeros(2), np.zeros(2))
NO_NUMBER += (np.True_, torch.tensor(True), b"0.5", bytearray(b"0.5"), np.array("1"), np.array(b"1"), np.complex64(1 + 1j))
NO_NUMBER += (torch.tensor(1j), np.timedelta64(1), np.array(1, "m8[ns]"), torch.tensor([0.5]), np.array([0.5]))
NANS = (NAN, np.float32(NAN), torch.tensor(NAN), 10**309)
BEYOND, BELOW = ((INF, 1e39, 1e300, 2**130), (-INF, -1e39, -1e300, -(2**130)))
BOUND, BOUND_ABOVE_0 = ({TypeError: NO_NUMBER, ValueError: (*NANS, *below)} for below in ((), (-1, -0.5, -INF)))
NUMBER = {TypeError: (None, *NO_NUMBER), ValueError: NANS}
FLOAT32 = {TypeError: (None, *NO_NUMBER), ValueError: (*NANS, *BEYOND, *BELOW)}
ABOVE_0 = {TypeError: (None, *NO_NUMBER), ValueError: (*NANS, 0, -1, -1e-8, -INF, INF)}
SHARE = {TypeError: (None, *NO_NUMBER), ValueError: (*NANS, -0.1, 1.1, 2, INF)}
TEXT = {TypeError: (None, 3, 0.5, b"time", ["time"], ("time",))}
FUNCTION = {TypeError: (None, 3, "tanh", [math.tanh], torch.zeros(2))}
SPACE = {TypeError: ((3,), "Box", spaces.Box, [FREE], 3, np.float32)}
SHAPE = {TypeError: (84, 8.4, "84", None, {8, 4}, np.array([2.0, 2.0]), torch.zeros(2))}
NO_FLOAT = {TypeError: (None, "float32", np.float32, float, torch.int64, torch.bool, torch.float16, torch.complex64)}
KEYS = {TypeError: ("kind", None, 3, {"kind"}, {"kind": 1}, np.array(["kind"])), ValueError: ([], (), ["a", "a"], [1, 0, 1])}
KEYS[TypeError] += (b"\0\1", bytearray(2), [["a"]], [{}], [np.array(0)], [None], [1.0], [True], [np.True_], [("a",)])
DTYPE = {TypeError: ("float31", "torch.float32", "", 3, 2.5, ["f4"], {"f4"}, torch.bfloat16, torch.float8_e5m2, np.floating)}
DTYPE[TypeError] += (None, np.float32(3), np.finfo("f4"), torch.zeros(1), torch.FloatTensor, np, [], {}, object, complex, str)
DTYPE[TypeError] += ("U3", "complex64", "float128", "uint16", np.uint32, torch.uint64, "f4,f4", "f4,,", "(2,)f4", ">f4")
NO_BOUNDS = ((None, 1), (0, None), ("a", "b"), (0, 1j), ({}, {}), ({0}, {1}), ([[0], [0, 0]], 1), ([0, 0], [1, 1, 1]))
NO_BOUNDS += ((False, True), ("0", "1"), (b"0", b"1"), (np.timedelta64(0), np.timedelta64(1)), (0, np.complex64(1 + 1j)))
NO_BOUNDS += ((10**309, 10**310), (0, [True]), (torch.tensor(0.0, requires_grad=True), 1))
UNORDERED = ((1, 1), (1, 0), (NAN, 1), (0, NAN), (INF, -INF), ([0, 1], [1, 1]), (0, [1, NAN]), (torch.tensor([0, 1]), 1))
INFINITE = ((-INF, 1), (0, INF), (-INF, INF), ([0, -INF], 1), (0, np.array([1, INF])))
ONE = T.ClipReward(-1, 1)
NO_LIST = ("", "ab", b"", {}, {"clip": ONE}, torch.zeros(0), torch.tensor(1), np.array(1), np.array([ONE]), TensorDict())
NO_NAMES = ("speed", [3], [None], b"ab", ["reward"], None, 3, ["a", "a"], {"a": 1}, {"a"}, [""], [["a"]], np.array(["a"]))
UNSERVED = {
    TypeError: (spaces.Text(3), spaces.Box(0, 9, (3,), np.uint16), spaces.Sequence(COUNT), spaces.Tuple([spaces.Text(3)]))
}
UNSERVED[ValueError] = (spaces.Dict({}), spaces.Tuple([]), spaces.Dict({1: FREE}))

observe, act, same = T.TransformObservation, T.TransformAction, torch.clone

# What is called, with what, and how the message begins; what came is the value, unless it is said here.
ARGUMENTS = [
    (T.TimeLimit, SIZE, "TimeLimit needs an integer max_episode_steps of at least 1"),
    (T.TimeLimit, NATURAL, "TimeLimit needs max_episode_steps of at least 1"),
    (T.TimeLimit, TOO_LARGE, "TimeLimit needs max_episode_steps of at most 9223372036854775807"),
    (T.FrameStackObservation, SIZE, "FrameStackObservation needs an integer stack_size of at least 1"),
    (T.FrameStackObservation, NATURAL, "FrameStackObservation needs stack_size of at least 1"),
    (T.FrameStackObservation, TOO_LARGE, "FrameStackObservation needs stack_size of at most 9223372036854775807"),
    (
        stack,
        {ValueError: ("", "rest", "Zero", b"0.5", b"zero")},
        'FrameStackObservation needs padding_type "reset", "zero" or',
    ),
    (T.DelayObservation, SIZE, "DelayObservation needs an integer delay of at least 0"),
    (T.DelayObservation, {ValueError: (-1, np.int8(-1), False)}, "DelayObservation needs delay of at least 0"),
    (T.RecordEpisodeStatistics, SIZE, "RecordEpisodeStatistics needs an integer buffer_length of at least 1"),
    (T.RecordEpisodeStatistics, NATURAL, "RecordEpisodeStatistics needs buffer_length of at least 1"),
    (lambda v: T.RecordEpisodeStatistics(9, v), TEXT, "RecordEpisodeStatistics needs a word as stats_key"),
    (T.DiscretizeObservation, INTEGER, "DiscretizeObservation needs an integer bins of at least 1"),
    (T.DiscretizeObservation, NATURAL, "DiscretizeObservation needs bins of at least 1"),
    (lambda v: T.DiscretizeObservation((3, v)), SIZE, "DiscretizeObservation needs an integer bins of at least 1"),
    (lambda v: T.DiscretizeObservation([v, 3]), NATURAL, "DiscretizeObservation needs bins of at least 1"),
    (lambda v: T.DiscretizeObservation(3, v), FLAG, "DiscretizeObservation needs multidiscrete as a bool"),
    (T.DiscretizeAction, INTEGER, "DiscretizeAction needs an integer bins of at least 1"),
    (lambda v: T.DiscretizeAction([v]), SIZE, "DiscretizeAction needs an integer bins of at least 1"),
    (lambda v: T.DiscretizeAction((3, v)), NATURAL, "DiscretizeAction needs bins of at least 1"),
    (lambda v: T.DiscretizeAction(3, v), FLAG, "DiscretizeAction needs multidiscrete as a bool"),
    (T.ReshapeObservation, SHAPE, "ReshapeObservation needs shape as a tuple"),
    (lambda v: T.ReshapeObservation((3, v)), SIZE, "ReshapeObservation needs an integer shape of at least 1"),
    (lambda v: T.ReshapeObservation([v]), NATURAL, "ReshapeObservation needs shape of at least 1"),
    (T.ResizeObservation, {TypeError: (*SHAPE[TypeError], (), [8], (8, 8, 3))}, "ResizeObservation needs shape as (height"),
    (lambda v: T.ResizeObservation([8, v]), SIZE, "ResizeObservation needs an integer shape of at least 1"),
    (lambda v: T.ResizeObservation((v, 8)), NATURAL, "ResizeObservation needs shape of at least 1"),
    (T.GrayscaleObservation, FLAG, "GrayscaleObservation needs keep_dim as a bool"),
    (T.AddWhiteNoise, SHARE, "AddWhiteNoise needs probability_of_noise_per_pixel in [0, 1"),
    (T.AddWhiteNoise, {ValueError: (1, 1.0)}, "AddWhiteNoise needs probability_of_noise_per_pixel in [0, 1)"),
    (lambda v: T.AddWhiteNoise(0.5, v), FLAG, "AddWhiteNoise needs is_noise_grayscale as a bool"),
    (lambda v: T.ObstructView(v, 2), SHARE, "ObstructView needs obstructed_pixels_ratio in [0, 1"),
    (lambda v: T.ObstructView(v, 2), {ValueError: (1, 1.0)}, "ObstructView needs obstructed_pixels_ratio in [0, 1)"),
    (lambda v: T.ObstructView(0.5, v), SIZE, "ObstructView needs an integer obstruction_width of at least 1"),
    (lambda v: T.ObstructView(0.5, v), NATURAL, "ObstructView needs obstruction_width of at least 1"),
    (lambda v: T.ObstructView(0.5, 2, v), FLAG, "ObstructView needs is_noise_grayscale as a bool"),
    (T.StickyAction, SHARE, "StickyAction needs repeat_action_probability in [0, 1"),
    (T.StickyAction, {ValueError: (1, 1.0)}, "StickyAction needs repeat_action_probability in [0, 1)"),
    (lambda v: T.StickyAction(0.5, (1, v)), SIZE, "StickyAction needs an integer repeat_action_duration of at least 1"),
    (lambda v: T.StickyAction(0.5, v), NATURAL, "StickyAction needs repeat_action_duration of at least 1"),
    (lambda v: T.StickyAction(0.5, (3, v)), {ValueError: (2, -1)}, "StickyAction needs repeat_action_duration of at least 3"),
    (lambda v: T.StickyAction(0.5, v), {ValueError: ((), [1], (1, 2, 3))}, "StickyAction needs repeat_action_duration as"),
    (lambda v: T.StickyAction(0.5, v), TOO_LARGE, "StickyAction needs repeat_action_duration of at most 2147483648"),
    (
        lambda v: T.StickyAction(0.5, (1, v)),
        {ValueError: (2**31 + 1,)},
        "StickyAction needs repeat_action_duration of at most",
    ),
    (T.EvalWrapper, {TypeError: NO_NAMES}, "EvalWrapper needs metrics as a list of names"),
    (T.TimeAwareObservation, FLAG, "TimeAwareObservation needs flatten as a bool"),
    (lambda v: T.TimeAwareObservation(True, v), FLAG, "TimeAwareObservation needs normalize_time as a bool"),
    (lambda v: T.TimeAwareObservation(dict_time_key=v), TEXT, "TimeAwareObservation needs dict_time_key as text"),
    (T.ScaleReward, FLOAT32, "ScaleReward needs scale in [-3.40282e+38, 3.40282e+38]"),
    (T.ClipReward, BOUND, "ClipReward needs min_reward in [-inf, 3.40282e+38]"),
    (T.ClipReward, {ValueError: BEYOND}, "ClipReward needs min_reward in [-inf, 3.40282e+38]"),
    (T.ClipReward, {ValueError: (None,)}, "ClipReward needs min_reward, max_reward or both, but got neither"),
    (lambda v: T.ClipReward(max_reward=v), BOUND, "ClipReward needs max_reward in [-3.40282e+38, inf]"),
    (lambda v: T.ClipReward(max_reward=v), {ValueError: BELOW}, "ClipReward needs max_reward in [-3.40282e+38, inf]"),
    (lambda v: T.ClipReward(-1e39, v), {ValueError: BELOW}, "ClipReward needs max_reward in [-3.40282e+38, inf]"),
    (lambda v: T.ClipReward(0, v), BOUND_ABOVE_0, "ClipReward needs max_reward in [0, inf]"),
    (lambda v: T.ClipObservation(v, 1), NUMBER, "ClipObservation needs a number as min_obs"),
    (lambda v: T.ClipObservation(0, v), BOUND_ABOVE_0, "ClipObservation needs max_obs in [0, inf]"),
    (T.NormalizeObservation, ABOVE_0, "NormalizeObservation needs a finite epsilon above 0"),
    (T.NormalizeReward, SHARE, "NormalizeReward needs gamma in [0, 1]"),
    (lambda v: T.NormalizeReward(0.9, v), ABOVE_0, "NormalizeReward needs a finite epsilon above 0"),
    (T.RunningMeanStd, {ValueError: ((),)}, "RunningMeanStd needs a shape of at least one dimension"),
    (T.RunningMeanStd, SHAPE, "RunningMeanStd needs shape as a tuple"),
    (lambda v: T.RunningMeanStd((3, v)), SIZE, "RunningMeanStd needs an integer shape of at least 0"),
    (lambda v: T.RunningMeanStd([v]), {ValueError: (-1, True)}, "RunningMeanStd needs shape of at least 0"),
    (lambda v: T.RunningMeanStd((3,), v), {ValueError: ("nope", "", "cuda:x")}, "RunningMeanStd needs a device of PyTorch's"),
    (
        lambda v: T.RunningMeanStd((3,), v),
        {TypeError: (None, 1.5, torch.float32)},
        "RunningMeanStd needs a device of PyTorch's",
    ),
    (lambda v: T.RunningMeanStd((3,), dtype=v), NO_FLOAT, "RunningMeanStd needs dtype torch.float32 or torch.float64"),
    (lambda v: T.RescaleObservation(*v), {ValueError: NO_BOUNDS + UNORDERED}, "RescaleObservation needs min_obs < max_obs"),
    (lambda v: T.RescaleAction(*v), {ValueError: NO_BOUNDS + UNORDERED + INFINITE}, "RescaleAction needs finite min_action <"),
    (T.DtypeObservation, DTYPE, "DtypeObservation needs a dtype of NumPy or PyTorch"),
    (T.FilterObservation, KEYS, "FilterObservation needs filter_keys"),
    (T.TransformObservation, FUNCTION, "TransformObservation needs a callable func"),
    (T.TransformReward, FUNCTION, "TransformReward needs a callable func"),
    (T.TransformAction, FUNCTION, "TransformAction needs a callable func"),
    (lambda v: T.TransformObservation(torch.tanh, v), SPACE, "TransformObservation needs a gymnasium Space as"),
    (
        lambda v: observe(torch.tanh, v),
        UNSERVED,
        "TransformObservation needs an observation_space that tensors can hold, but got",
    ),
    (lambda v: T.TransformAction(torch.tanh, v), SPACE, "TransformAction needs a gymnasium Space as"),
    (lambda v: act(torch.tanh, v), UNSERVED, "TransformAction needs an action_space that tensors can hold, but got"),
    (T.Compose, {TypeError: (None, 3, math.tanh, ONE, *NO_LIST)}, "Compose needs a list of Transforms"),
    (T.Compose, {TypeError: (["ab"], {"ab"})}, "Compose needs Transforms, but got str at transforms[0]"),
    (T.Compose, {TypeError: ([ONE, None],)}, "Compose needs Transforms, but got NoneType at transforms[1]"),
    (T.Compose, {TypeError: ([ONE, [ONE]],)}, "Compose needs Transforms, but got list at transforms[1]"),
    (T.Compose, {TypeError: ([T.ClipAction],)}, "Compose needs Transforms, but got type at transforms[0]"),
    (T.Compose, {ValueError: ([ONE, ONE], [ONE, T.Compose([ONE])])}, "Compose needs each transform once, but got ClipReward"),
]

# What a function gives where numbers (2, 3), or rewards (2, 1), are needed; the error, and a pattern of its message.
RESULTS = [
    (lambda x: x[:1], ValueError, r"of shape \(2, \d\) .*, but got \(1, \d\)"),
    (lambda x: x.sum(), ValueError, r"of shape \(2, \d\) .*, but got \(\)"),
    (lambda x: x.unsqueeze(1), ValueError, r"of shape \(2, \d\) .*, but got \(2, 1, \d\)"),
    (lambda x: x.double(), TypeError, "of dtype torch.float32 .*, but got torch.float64"),
    (lambda x: x.half(), TypeError, "of dtype torch.float32 .*, but got torch.float16"),
    (lambda x: x.argsort(), TypeError, "of dtype torch.float32 .*, but got torch.int64"),
    (lambda x: x > 0, TypeError, "of dtype torch.float32 .*, but got torch.bool"),
    (lambda x: x + 0j, TypeError, "of dtype torch.float32 .*, but got torch.complex64"),
    (lambda x: x.to("meta"), ValueError, "on device cpu, but got meta"),
    (lambda x: x.numpy(), TypeError, "as a torch.Tensor, but got ndarray"),
    (lambda x: x.tolist(), TypeError, "as a torch.Tensor, but got list"),
    (lambda x: {"a": x}, TypeError, "as a torch.Tensor, but got dict"),
    (lambda x: TensorDict(a=x), TypeError, "as a torch.Tensor, but got TensorDict"),
    (lambda x: 1.0, TypeError, "as a torch.Tensor, but got float"),
    (lambda x: None, TypeError, "as a torch.Tensor, but got NoneType"),
]

# What is made, each space that it does not fit (None: an env without a limit of steps), the error, how its message begins, as
# a pattern, and a space that fits, if there is one. For transforms of actions they are spaces of actions.
UNFIT = [
    (lambda: T.ClipObservation(0, 1), NO_BOX, TypeError, "ClipObservation needs a Box observation space", FREE),
    (lambda: T.ClipObservation(300, 400), (BYTES,), ValueError, "ClipObservation needs .* uint8 .*, but got .*=300", WHOLE),
    (lambda: T.ClipObservation(1.2, 1.8), (WHOLE,), ValueError, "ClipObservation needs .* int64 .*, but got .*=1.2", FREE),
    (lambda: T.ClipObservation(-9, -1), (COLOR,), ValueError, "ClipObservation needs .* uint8 .*, but got .*=-9", WHOLE),
    (lambda: T.ClipObservation(0, 1), (BOOLS,), TypeError, "ClipObservation needs a Box observation space of numbers", FREE),
    (
        lambda: T.ClipObservation(1e39, 1e40),
        (FREE, HALVES),
        ValueError,
        "ClipObservation .* float.*, but got .*=1e.39",
        DOUBLES,
    ),
    (
        lambda: T.ClipObservation(-1e40, -1e39),
        (FREE,),
        ValueError,
        "ClipObservation .* float32 .*, but got .*=-1e.40",
        DOUBLES,
    ),
    (lambda: T.ClipObservation(1e5, 2e5), (HALVES,), ValueError, "ClipObservation .* float16 .*, but got .*=100000.0", FREE),
    (lambda: T.ClipObservation(INF, INF), (FREE, BYTES, WHOLE), ValueError, "ClipObservation needs .*, but got .*=inf"),
    (lambda: T.ClipObservation(-INF, -INF), (FREE, BYTES, WHOLE), ValueError, "ClipObservation needs .*, but got .*=-inf"),
    (
        T.NormalizeObservation,
        (BOOLS, spaces.Dict(a=BOOLS)),
        TypeError,
        "NormalizeObservation needs .* of numbers, but got",
        BYTES,
    ),
    (T.NormalizeObservation, (COUNT, BITS, GRID), TypeError, "NormalizeObservation needs a Box observation space", SCALAR),
    (T.NormalizeObservation, (DICT, PAIR), TypeError, "NormalizeObservation needs a Box .*, but got .*Discrete", COLOR),
    (lambda: T.ReshapeObservation((3, 1)), NO_BOX, TypeError, "ReshapeObservation needs a Box observation space", FINITE),
    (lambda: T.ReshapeObservation([16]), (COLOR,), ValueError, r"ReshapeObservation needs .* 48 .*, but got \(16,\)", GRAY),
    (lambda: T.ReshapeObservation(()), (FREE,), ValueError, r"ReshapeObservation needs .* 3 .*, but got \(\)", SCALAR),
    (lambda: T.RescaleObservation(0, 1), NO_FLOATS, TypeError, "RescaleObservation needs a Box .* space of floats", FLOATS),
    (lambda: T.RescaleObservation(0, 1), (FREE, HALF), ValueError, "RescaleObservation needs .*, but got 0 and 1", FINITE),
    (lambda: T.RescaleObservation(0, INF), (FREE, FINITE), ValueError, "RescaleObservation .*, but got 0 and inf", HALF),
    (lambda: T.RescaleObservation(-INF, INF), (HALF,), ValueError, "RescaleObservation .*, but got -inf and inf", FREE),
    (lambda: T.RescaleObservation(0, 1), (FLAT,), ValueError, "RescaleObservation needs .* with low < high", SCALAR),
    (lambda: T.RescaleObservation([0, 0], 1), (FINITE,), ValueError, r"RescaleObservation needs .*, but got \(2,\)"),
    (lambda: T.RescaleObservation([0] * 3, 1), (SCALAR,), ValueError, r"RescaleObservation .*, but got \(3,\)", FINITE),
    (lambda: T.RescaleObservation([], []), (FINITE,), ValueError, r"RescaleObservation needs .*, but got \(0,\)"),
    (
        lambda: T.RescaleObservation(-1e300, 1e300),
        (FINITE, WIDE),
        ValueError,
        "RescaleObservation .* float32 .*, but got",
        DOUBLES,
    ),
    (lambda: T.RescaleObservation(0, 1e-46), (FINITE,), ValueError, "RescaleObservation .* float32 .*, but got", DOUBLES),
    (lambda: T.RescaleObservation(1, 1 + 1e-9), (FINITE,), ValueError, "RescaleObservation .* float32 .*, but got", DOUBLES),
    (lambda: T.RescaleObservation(-1e300, INF), (HALF,), ValueError, "RescaleObservation needs .* float32 .*, but got"),
    (lambda: T.RescaleObservation(-1, 1), (spaces.Box(0, 1e-45, (2,)),), ValueError, "RescaleObservation .*, but got", WIDE),
    (lambda: T.RescaleAction(-1e300, 1e300), (FINITE,), ValueError, "RescaleAction needs .* float32 .*, but got", DOUBLES),
    (lambda: T.RescaleAction(0, 1e-46), (FINITE,), ValueError, "RescaleAction needs .* float32 .*, but got", DOUBLES),
    (lambda: T.RescaleAction(1, 1 + 1e-9), (FINITE,), ValueError, "RescaleAction needs .* float32 .*, but got", DOUBLES),
    (lambda: T.RescaleAction(0, 1), NO_FLOATS, TypeError, "RescaleAction needs a Box action space of floats", FLOATS),
    (lambda: T.RescaleAction(0, 1), (FREE, HALF), ValueError, "RescaleAction needs .* with finite bounds", FINITE),
    (lambda: T.RescaleAction(0, 1), (FLAT,), ValueError, "RescaleAction needs an action space with low < high", SCALAR),
    (lambda: T.RescaleAction([0, 0], 1), (FINITE,), ValueError, r"RescaleAction needs bounds .*, but got \(2,\)"),
    (T.ClipAction, NO_FLOATS, TypeError, "ClipAction needs a Box action space of floats", HALF),
    (lambda: T.Compose([T.ScaleReward(2), T.ClipAction()]), (BITS,), TypeError, r"transforms\[1\].*: ClipAction needs", FREE),
    (lambda: T.DiscretizeObservation(3), NO_BOX, TypeError, "DiscretizeObservation needs a Box observation space", FINITE),
    (lambda: T.DiscretizeObservation(3), (FREE, HALF), ValueError, "DiscretizeObservation needs .* finite bounds", SCALAR),
    (lambda: T.DiscretizeObservation([3]), (FINITE,), ValueError, r"DiscretizeObservation .*, but got \(3,\)", SCALAR),
    (lambda: T.DiscretizeObservation(()), (SCALAR,), ValueError, r"DiscretizeObservation needs .*, but got \(\)"),
    (lambda: T.DiscretizeObservation(2**21), (FINITE,), ValueError, "DiscretizeObservation needs at most .*, but got 2097152"),
    (lambda: T.DiscretizeObservation(3), (WIDE,), ValueError, "DiscretizeObservation needs a box .* finite width", FINITE),
    (lambda: T.DiscretizeObservation(3), (BOOLS,), TypeError, "DiscretizeObservation needs a Box .* of numbers", BYTES),
    (lambda: T.DiscretizeAction(3), NO_BOX, TypeError, "DiscretizeAction needs a Box action space", WHOLE),
    (lambda: T.DiscretizeAction(3), (FREE, HALF), ValueError, "DiscretizeAction needs a box with finite bounds", FINITE),
    (lambda: T.DiscretizeAction([3]), (FINITE,), ValueError, r"DiscretizeAction needs bins .*, but got \(3,\)", SCALAR),
    (lambda: T.DiscretizeAction(3), (COLOR,), ValueError, "DiscretizeAction needs at most .*, but got 3 in 48", SCALAR),
    (
        lambda: T.DiscretizeAction(1291),
        (FINITE,),
        ValueError,
        "DiscretizeAction needs at most 2147483648 .*, but got 1291",
        SCALAR,
    ),
    (lambda: T.DiscretizeAction(3), (WIDE,), ValueError, "DiscretizeAction needs a box .* finite width", FINITE),
    (lambda: T.DiscretizeAction(3), (BOOLS,), TypeError, "DiscretizeAction needs a Box .* of numbers", BYTES),
    (T.GrayscaleObservation, NO_IMAGE, TypeError, "GrayscaleObservation needs images as Box", COLOR),
    (T.GrayscaleObservation, (GRAY, images(3, 4, 4)), ValueError, "GrayscaleObservation needs images with 3", COLOR),
    (lambda: T.AddWhiteNoise(0.5), NO_IMAGE, TypeError, "AddWhiteNoise needs images as Box", GRAY),
    (lambda: T.AddWhiteNoise(0.5, True), (GRAY, images(3, 4, 4)), ValueError, "AddWhiteNoise needs images with 3", COLOR),
    (lambda: T.ObstructView(0.5, 2), NO_IMAGE, TypeError, "ObstructView needs images as Box", GRAY),
    (lambda: T.ObstructView(0.5, 2, True), (GRAY, images(3, 4, 4)), ValueError, "ObstructView needs images with 3", COLOR),
    (lambda: T.ResizeObservation((2, 2)), NO_IMAGE, TypeError, "ResizeObservation needs images as Box", GRAY),
    (lambda: T.ResizeObservation((5, 4)), (COLOR,), ValueError, r"ResizeObservation .*, but got \(5, 4\)", images(5, 4)),
    (lambda: T.ResizeObservation((4, 9)), (GRAY,), ValueError, r"ResizeObservation .*, but got \(4, 9\)", images(4, 9)),
    (lambda: T.DtypeObservation("float32"), (GRID, DICT, PAIR), TypeError, "DtypeObservation needs .* fit float32", BITS),
    (lambda: T.DtypeObservation("uint8"), (WHOLE, FREE, HALF), TypeError, "DtypeObservation needs .* fit uint8", COLOR),
    (lambda: T.DtypeObservation("int32"), (FREE, HALF), TypeError, "DtypeObservation needs .* fit int32", FINITE),
    (lambda: T.DtypeObservation(torch.int8), (FREE, HALF), TypeError, "DtypeObservation needs .* fit int8", FINITE),
    (lambda: T.DtypeObservation(torch.int8), (BYTES, COLOR), TypeError, "DtypeObservation needs .* fit int8", WHOLE),
    (lambda: T.DtypeObservation(bool), (FINITE, COUNT), TypeError, "DtypeObservation needs .* values fit bool", BITS),
    (lambda: T.FilterObservation(["kind"]), (FREE, COUNT), TypeError, "FilterObservation needs a Dict or Tuple", DICT),
    (lambda: T.FilterObservation(["kind", "a"]), (DICT,), ValueError, r"FilterObservation .*, but got \['kind', 'a'\]"),
    (lambda: T.FilterObservation([0]), (DICT,), ValueError, r"FilterObservation needs .*, but got \[0\]", PAIR),
    (lambda: T.FilterObservation(["kind"]), (PAIR,), ValueError, r"FilterObservation needs .*, but got \['kind'\]", DICT),
    (lambda: T.FilterObservation([1, 2]), (PAIR,), ValueError, r"FilterObservation needs .*, but got \[1, 2\]"),
    (lambda: T.FilterObservation([-1]), (PAIR,), ValueError, r"FilterObservation needs .*, but got \[-1\]"),
    (lambda: stack(None), (FREE, *NO_BOX), ValueError, "FrameStackObservation needs a padding_type in .*, but got None"),
    (lambda: stack(3), (FREE, COUNT, DICT), ValueError, "FrameStackObservation needs .*, but got 3", SCALAR),
    (lambda: stack(1.5), (COUNT, FREE), ValueError, "FrameStackObservation needs .*, but got 1.5", SCALAR),
    (lambda: stack(np.zeros(3)), (FREE, GRAY), ValueError, "FrameStackObservation needs .*, but got array"),
    (lambda: stack(np.float32([50, 0, 0])), (FINITE,), ValueError, r"FrameStackObservation .*, but got array\(\[50", FREE),
    (lambda: stack(np.full(3, NAN)), (FREE,), ValueError, r"FrameStackObservation needs .*, but got array\(\[nan"),
    (lambda: stack([0, 2, 0]), (BITS, GRID), ValueError, r"FrameStackObservation needs .*, but got \[0, 2, 0\]"),
    (lambda: stack({"kind": 1}), (DICT, COUNT), ValueError, "FrameStackObservation needs .*, but got {'kind': 1}"),
    (lambda: stack((1,)), (PAIR, DICT), ValueError, r"FrameStackObservation .*, but got \(1,\)", spaces.Tuple([COUNT])),
    (T.TimeAwareObservation, (None,), ValueError, "TimeAwareObservation needs an env with a limit .*, but got none", FREE),
    (lambda: T.TimeAwareObservation(dict_time_key="kind"), (DICT,), ValueError, "TimeAware.*, but got 'kind'", PAIR),
    (lambda: observe(lambda x: x + 7), (COUNT,), ValueError, "TransformObservation needs .*, but got values from 7", FREE),
    (lambda: observe(lambda x: x["kind"]), (DICT,), TypeError, "TransformObservation needs .* keys .*, but got Tensor"),
    (lambda: observe(lambda x: x.select("kind")), (DICT,), TypeError, r"TransformObservation .*, but got \['kind'\]"),
    (lambda: observe(same, COLOR), (FREE, COUNT, GRAY), ValueError, r"TransformObservation needs .*, but got \(2", COLOR),
    (lambda: observe(same, BYTES), (FREE, WHOLE), TypeError, "TransformObservation needs .*, but got torch", BYTES),
    (lambda: observe(same, DICT), (FREE, COUNT), TypeError, "TransformObservation needs .*, but got Tensor"),
    (
        lambda: observe(lambda x: x @ x),
        (FINITE,),
        ValueError,
        "TransformObservation needs a func .*, but got RuntimeError",
        GRAY,
    ),
    (lambda: observe(lambda x, y: x), (FREE, DICT), TypeError, "TransformObservation needs a func .*, but got TypeError"),
    (lambda: act(lambda x: x["kind"]), (FREE,), ValueError, "TransformAction needs a func .*, but got IndexError"),
    (lambda: act(lambda: 0), (FREE, COUNT), TypeError, "TransformAction needs a func .*, but got TypeError"),
    (lambda: T.TransformReward(lambda x, y: x), (FREE,), TypeError, "TransformReward needs a func .*, but got TypeError"),
    (lambda: act(lambda x: x - 1), (COUNT,), ValueError, "TransformAction needs .*, but got values from -1 to -1", FREE),
    (lambda: act(same, COUNT), (FREE, GRID), ValueError, r"TransformAction needs .*, but got \(2,\)", COUNT),
    (lambda: act(same, BYTES), (FREE, WHOLE), TypeError, "TransformAction needs .*, but got torch.uint8", BYTES),
]
for make in (T.TransformObservation, T.TransformReward, T.TransformAction):
    for function, error, words in RESULTS:
        UNFIT.append((functools.partial(make, function), (FINITE,), error, f"{make.__name__} needs func to give .* {words}"))

CONSTRUCTORS = [
    (make, value, error, words) for make, wrong, words in ARGUMENTS for error, values in wrong.items() for value in values
]
SETUPS = [(make, space, *rest) for make, unfit, *rest in UNFIT for space in unfit]


@pytest.mark.parametrize("row", CONSTRUCTORS, ids=[f"{row[3]}: {row[1]!r}" for row in CONSTRUCTORS])
def test_a_wrong_argument_is_refused(row):
    make, value, error, words = row
    with pytest.raises((TypeError, ValueError)) as raised:
        make(value)
    message = str(raised.value)
    assert type(raised.value) is error and message.startswith(words), message
    came = repr(value), " and ".join(map(repr, value)) if isinstance(value, tuple) else "?"
    assert "but got" in words or message.endswith(tuple(f", but got {one}." for one in came)), message


def outermost(transform):
    return [*transform.flat()][-1]


def env_of(transform, space):
    """A new env with this space of actions, for a transform of actions, or of observations."""
    if space is None:
        return ScriptedEnv(2)
    which = "action_space" if isinstance(outermost(transform), T.ActionTransform) else "observation_space"
    return tw.TransformedEnv(ScriptedEnv(2, **{which: copy.deepcopy(space)}), T.TimeLimit(3))


def steps(env, td):
    return dict(tw.rollout(env, None, 5, td)[0].items(True, True))


def assert_same(one, other):
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")  # Gymnasium's, from Box.contains
@pytest.mark.parametrize("row", SETUPS, ids=[f"{row[3]}: {row[1]}" for row in SETUPS])
def test_an_unfit_space_is_refused_and_harms_neither_env_nor_transform(row):
    make, space, error, words, *fits = row
    transform, env, untouched = make(), env_of(make(), space), env_of(make(), space)
    td = env.reset(seed=0)
    with pytest.raises((TypeError, ValueError)) as raised:
        tw.TransformedEnv(env, transform)
    message = str(raised.value)
    assert type(raised.value) is error and re.match(words, message), message
    assert re.search(rf"\b{type(outermost(transform)).__name__} needs .*, but got ", message), message
    assert "but got" in words or f", but got {space}" in message, message
    assert not any(part.in_use for part in transform.flat())
    assert env.signature == untouched.signature
    assert_same(steps(env, td), steps(untouched, untouched.reset(seed=0)))
    for fit in fits:
        one, other = (tw.TransformedEnv(env_of(transform, fit), part) for part in (transform, make()))
        assert_same(steps(one, one.reset(seed=0)), steps(other, other.reset(seed=0)))


def test_every_class_that_takes_arguments_has_rows():
    takes = {name for name in T.__all__ if {*inspect.signature(getattr(T, name)).parameters} - {"args", "kwargs"}}
    assert takes == {words.split()[0] for _, _, _, words in CONSTRUCTORS}
    assert len(CONSTRUCTORS) + len(SETUPS) >= 150
