"""Every invalid argument of a transform raises, with a message that states what is needed and what was given."""

import inspect
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from gymnasium import spaces

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap._core import validation

INF, NAN = math.inf, math.nan

# A case is what is called, invalid values by the error that they raise, and how its message starts. The message ends with the
# value, unless the start contains it.

NO_INTEGER = (None, "3", 2.0, NAN, torch.ones(2), np.True_, np.float64(2), torch.tensor(True))
INTEGER, NATURAL = {TypeError: NO_INTEGER}, {ValueError: (0, np.int64(-7), True)}
TOO_LARGE, SHAPE = (
    {ValueError: (2**63, 10**30)},
    {TypeError: (84, "84", None, np.array([2.0, 2.0]))},
)
FLAG = {TypeError: (None, 1, "yes", np.True_)}
NO_NAMES = ("speed", [3], b"ab", ["reward"], None, ["a", "a"], {"a": 1}, [""], np.array(["a"]))
NO_PADDING = {ValueError: ("", "rest", "Zero", b"zero")}
NO_NUMBER, NANS = (
    ("0.5", b"0.5", [0.5], 1j, True, np.zeros(2), torch.tensor([0.5])),
    (NAN, torch.tensor(NAN), 10**309),
)
NO_NUMBER += (np.True_, np.array("1"), np.timedelta64(1, "s"), np.array(1, "m8[ns]"))
BEYOND, BELOW = (INF, 1e39, 2**130), (-INF, -1e39, -(2**130))
BOUND, BOUND_ABOVE_0 = (
    {TypeError: NO_NUMBER, ValueError: (*NANS, *below)} for below in ((), (-1, -0.5, -INF))
)
NUMBER = {TypeError: (None, *NO_NUMBER), ValueError: NANS}
FLOAT32 = {TypeError: (None, *NO_NUMBER), ValueError: (*NANS, *BEYOND, *BELOW)}
ABOVE_0 = {TypeError: (None, *NO_NUMBER), ValueError: (*NANS, 0, -1e-8, INF)}
FRACTION = {TypeError: (None, *NO_NUMBER), ValueError: (*NANS, -0.1, 1.1, INF)}
BELOW_1 = {**FRACTION, ValueError: (*FRACTION[ValueError], 1)}
NUMBERS = [
    (
        T.TimeLimit,
        {TypeError: (*NO_INTEGER, [2], np.array([2]))},
        "TimeLimit needs max_episode_steps as an integer of at least 1",
    ),
    (T.TimeLimit, NATURAL, "TimeLimit needs max_episode_steps as an integer of at least 1"),
    (
        T.TimeLimit,
        TOO_LARGE,
        "TimeLimit needs max_episode_steps as an integer of at most 9223372036854775807",
    ),
    (
        T.FrameStackObservation,
        NATURAL,
        "FrameStackObservation needs stack_size as an integer of at least 1",
    ),
    (
        lambda v: T.FrameStackObservation(2, padding_type=v),
        NO_PADDING,
        "FrameStackObservation needs padding_type",
    ),
    (
        T.DelayObservation,
        {ValueError: (-1, False)},
        "DelayObservation needs delay as an integer of at least 0",
    ),
    (
        T.DelayAction,
        {ValueError: (-1, False)},
        "DelayAction needs delay as an integer of at least 0",
    ),
    (
        lambda v: T.DelayAction((3, v)),
        {ValueError: (2, -1)},
        "DelayAction needs delay as an integer of at least 3",
    ),
    (
        T.DelayAction,
        {ValueError: ((), (1, 2, 3))},
        "DelayAction needs delay as a number, a pair, or a",
    ),
    (
        T.DelayAction,
        {ValueError: (torch.ones(2),)},
        "DelayAction needs a delay of shape (num_envs,) torch.int64, but got (2,)",
    ),
    (
        lambda v: T.DelayAction(1, padding_type=v),
        {ValueError: ("reset",)},
        "DelayAction needs padding_type",
    ),
    (
        T.AddNoise,
        {ValueError: (-1, NAN, "1", None, [0, -1])},
        "AddNoise needs a scale of finite numbers",
    ),
    (
        lambda v: T.AddNoise(1, v),
        {ValueError: ("gauss", None)},
        'AddNoise needs distribution="normal" or "uniform"',
    ),
    (lambda v: T.AddNoise(1, in_eval=v), FLAG, "AddNoise needs in_eval as a bool"),
    (
        T.RecordEpisodeStatistics,
        NATURAL,
        "RecordEpisodeStatistics needs buffer_length as an integer of at least 1",
    ),
    (
        lambda v: T.RecordEpisodeStatistics(9, v),
        {TypeError: (None, 3, b"time")},
        "RecordEpisodeStatistics needs a",
    ),
    (
        T.DiscretizeObservation,
        INTEGER,
        "DiscretizeObservation needs bins as an integer of at least 1",
    ),
    (
        lambda v: T.DiscretizeObservation([v, 3]),
        NATURAL,
        "DiscretizeObservation needs each of bins as an integer of at",
    ),
    (
        lambda v: T.DiscretizeObservation(3, v),
        FLAG,
        "DiscretizeObservation needs multidiscrete as a bool",
    ),
    (T.DiscretizeAction, INTEGER, "DiscretizeAction needs bins as an integer of at least 1"),
    (T.ReshapeObservation, SHAPE, "ReshapeObservation needs shape as a tuple"),
    (
        lambda v: T.ReshapeObservation([v]),
        NATURAL,
        "ReshapeObservation needs every size in shape as an integer of at least 1",
    ),
    (
        T.ResizeObservation,
        {TypeError: (*SHAPE[TypeError], (), [8], (8, 8, 3))},
        "ResizeObservation needs shape as (height",
    ),
    (
        lambda v: T.ResizeObservation((v, 8)),
        NATURAL,
        "ResizeObservation needs every size in shape as an integer of",
    ),
    (T.GrayscaleObservation, FLAG, "GrayscaleObservation needs keep_dim as a bool"),
    (
        lambda v: T.GrayscaleObservation(formula=v),
        NO_PADDING,
        'GrayscaleObservation needs formula="gymnasium" or "opencv"',
    ),
    (
        T.atari,
        {ValueError: (None, "dqn", ["sb3"])},
        'atari needs preset="cleanrl", "gymnasium" or "sb3"',
    ),
    (T.AddWhiteNoise, BELOW_1, "AddWhiteNoise needs probability_of_noise_per_pixel in [0, 1)"),
    (lambda v: T.AddWhiteNoise(0.5, v), FLAG, "AddWhiteNoise needs is_noise_grayscale as a bool"),
    (
        lambda v: T.ObstructView(v, 2),
        BELOW_1,
        "ObstructView needs obstructed_pixels_ratio in [0, 1)",
    ),
    (
        lambda v: T.ObstructView(0.5, v),
        NATURAL,
        "ObstructView needs obstruction_width as an integer of at least 1",
    ),
    (lambda v: T.ObstructView(0.5, 2, v), FLAG, "ObstructView needs is_noise_grayscale as a bool"),
    (T.StickyAction, BELOW_1, "StickyAction needs repeat_action_probability in [0, 1)"),
    (
        lambda v: T.StickyAction(0.5, v),
        NATURAL,
        "StickyAction needs repeat_action_duration as an integer of at least 1",
    ),
    (
        lambda v: T.StickyAction(0.5, (3, v)),
        {ValueError: (2, -1)},
        "StickyAction needs repeat_action_duration as an integer",
    ),
    (
        lambda v: T.StickyAction(0.5, v),
        {ValueError: ((), [1], (1, 2, 3))},
        "StickyAction needs repeat_action_duration as",
    ),
    (
        lambda v: T.StickyAction(0.5, (1, v)),
        TOO_LARGE,
        "StickyAction needs repeat_action_duration as an integer of at most 2",
    ),
    (T.TimeAwareObservation, FLAG, "TimeAwareObservation needs flatten as a bool"),
    (
        lambda v: T.TimeAwareObservation(True, v),
        FLAG,
        "TimeAwareObservation needs normalize_time as a bool",
    ),
    (
        lambda v: T.TimeAwareObservation(dict_time_key=v),
        {TypeError: (None, 3)},
        "TimeAwareObservation needs",
    ),
    (T.ScaleReward, FLOAT32, "ScaleReward needs scale in [-3.40282e+38, 3.40282e+38]"),
    (
        T.ClipReward,
        {**BOUND, ValueError: BEYOND},
        "ClipReward needs min_reward in [-inf, 3.40282e+38]",
    ),
    (
        T.ClipReward,
        {ValueError: (None,)},
        "ClipReward needs min_reward, max_reward or both, but got neither",
    ),
    (
        lambda v: T.ClipReward(max_reward=v),
        {**BOUND, ValueError: BELOW},
        "ClipReward needs max_reward in [-3.40282e+38, inf]",
    ),
    (
        lambda v: T.ClipReward(-1e39, v),
        {ValueError: BELOW},
        "ClipReward needs max_reward in [-3.40282e+38, inf]",
    ),
    (lambda v: T.ClipReward(0, v), BOUND_ABOVE_0, "ClipReward needs max_reward in [0, inf]"),
    (lambda v: T.ClipObservation(v, 1), NUMBER, "ClipObservation needs a number as min_obs"),
    (lambda v: T.ClipObservation(0, v), BOUND_ABOVE_0, "ClipObservation needs max_obs in [0, inf]"),
    (T.NormalizeObservation, ABOVE_0, "NormalizeObservation needs a finite epsilon above 0"),
    (T.NormalizeReward, FRACTION, "NormalizeReward needs gamma in [0, 1]"),
    (
        lambda v: T.NormalizeReward(0.9, v),
        ABOVE_0,
        "NormalizeReward needs a finite epsilon above 0",
    ),
]

NO_BOUNDS = (
    (None, 1),
    (0, None),
    ("a", "b"),
    (0, 1j),
    ({0}, {1}),
    ([[0], [0, 0]], 1),
    ([0, 0], [1, 1, 1]),
)
NO_BOUNDS += (
    (False, True),
    (np.timedelta64(0, "s"), np.timedelta64(1, "s")),
    (torch.tensor(0.0, requires_grad=True), 1),
)
UNORDERED = (
    (1, 1),
    (1, 0),
    (NAN, 1),
    (0, NAN),
    (INF, -INF),
    ([0, 1], [1, 1]),
    (0, [1, NAN]),
    (torch.tensor([0, 1]), 1),
)
INFINITE = ((-INF, 1), (0, INF), (0, np.array([1, INF])))
NO_FLOAT = {TypeError: (None, "float32", np.float32, float, torch.int64, torch.float16)}
DTYPE = {
    TypeError: (
        "float31",
        "torch.float32",
        "",
        3,
        ["f4"],
        torch.bfloat16,
        np.floating,
        None,
        torch.zeros(1),
        np,
        object,
    )
}
DTYPE[TypeError] += (
    complex,
    str,
    "U3",
    "complex64",
    "float128",
    "uint16",
    np.uint32,
    torch.uint64,
    "f4,f4",
    "(2,)f4",
    ">f4",
)
NO_DEVICE = {ValueError: ("nope", "", "cuda:x"), TypeError: (None, 1.5, torch.float32)}
KEYS = {
    TypeError: (
        "kind",
        None,
        {"kind"},
        {"kind": 1},
        np.array(["kind"]),
        b"\0",
        [["a"]],
        [None],
        [1.0],
        [True],
    )
}
KEYS[ValueError] = ([], (), ["a", "a"], [1, 0, 1])
FUNCTION, SPACE = (
    {TypeError: (None, 3, "tanh", [math.tanh])},
    {TypeError: ((3,), "Box", spaces.Box, np.float32)},
)
TEXTS, NUMBERED = spaces.Text(3), spaces.Dict({1: spaces.Box(-INF, INF, (3,))})
UNSUPPORTED = {TypeError: (TEXTS, spaces.Box(0, 9, (3,), np.uint16), spaces.Tuple([TEXTS]))}
UNSUPPORTED[ValueError] = (spaces.Dict({}), spaces.Tuple([]), NUMBERED)
ONE, FITS = T.ClipReward(-1, 1), "that tensors can hold, but got"
RESERVED = {ValueError: ({"done": ()}, {"": ()}, {2: ()}, {"observation": (64,)})}
FILL = {TypeError: ("0", None, [0.0], torch.zeros(1), np.zeros(2), 1j)}
UINT8, FLOAT32 = (
    "needs a fill that torch.uint8 can represent",
    "needs a fill that torch.float32 can represent",
)
OTHERS = [
    (
        lambda v: T.RescaleObservation(*v),
        {ValueError: NO_BOUNDS + UNORDERED},
        "RescaleObservation needs min_obs < max_obs",
    ),
    (
        lambda v: T.RescaleAction(*v),
        {ValueError: NO_BOUNDS + UNORDERED + INFINITE},
        "RescaleAction needs finite min_action <",
    ),
    (
        lambda v: T.RunningMeanStd((3,), v),
        NO_DEVICE,
        "RunningMeanStd needs a torch.device or its name",
    ),
    (
        lambda v: T.RunningMeanStd((3,), dtype=v),
        NO_FLOAT,
        "RunningMeanStd needs dtype torch.float32 or torch.float64",
    ),
    (
        lambda v: T.RunningMeanStd([v]),
        {ValueError: (-1, True)},
        "RunningMeanStd needs every size in shape as an integer of",
    ),
    (
        T.RunningMeanStd,
        {ValueError: ((),)},
        "RunningMeanStd needs a shape of at least one dimension",
    ),
    (T.DtypeObservation, DTYPE, "DtypeObservation needs a dtype of NumPy or PyTorch"),
    (T.FilterObservation, KEYS, "FilterObservation needs filter_keys"),
    (T.TransformObservation, FUNCTION, "TransformObservation needs a callable func"),
    (T.TransformReward, FUNCTION, "TransformReward needs a callable func"),
    (T.TransformAction, FUNCTION, "TransformAction needs a callable func"),
    (
        lambda v: T.TransformObservation(torch.tanh, v),
        SPACE,
        "TransformObservation needs a gymnasium Space as",
    ),
    (
        lambda v: T.TransformObservation(torch.tanh, v),
        UNSUPPORTED,
        f"TransformObservation needs an observation_space {FITS}",
    ),
    (
        lambda v: T.TransformAction(torch.tanh, v),
        SPACE,
        "TransformAction needs a gymnasium Space as",
    ),
    (
        lambda v: T.TransformAction(torch.tanh, v),
        UNSUPPORTED,
        f"TransformAction needs an action_space {FITS}",
    ),
    (T.Compose, {TypeError: (None, 3, math.tanh, ONE)}, "Compose needs a list of Transforms"),
    (
        T.Compose,
        {TypeError: ("ab", ["ab"])},
        "Compose needs Transforms, but got str at transforms[0]",
    ),
    (
        lambda v: T.Compose({v: ONE}),
        {ValueError: ("0", "a.b", "", "setup", 3)},
        "Compose needs names that are identifiers",
    ),
    (
        T.Compose,
        {TypeError: ([ONE, [ONE]],)},
        "Compose needs Transforms, but got list at transforms[1]",
    ),
    (
        T.Compose,
        {TypeError: ([T.ClipAction],)},
        "Compose needs Transforms, but got the class ClipAction at transforms[0]",
    ),
    (
        T.Compose,
        {ValueError: ([ONE, ONE], [ONE, T.Compose([ONE])])},
        "Compose needs each transform once, but got ClipReward",
    ),
    (
        tw.PolicyState,
        {TypeError: (None, {}, (64,), "hidden")},
        'PolicyState needs shapes by name, such as {"hidden": (64,)}',
    ),
    (
        tw.PolicyState,
        RESERVED,
        "PolicyState needs identifiers that roots and steps do not use as names, but got",
    ),
    (
        lambda v: tw.PolicyState({"h": v}),
        {TypeError: (64, "64", None)},
        "PolicyState needs the shape of h as a tuple",
    ),
    (
        lambda v: tw.PolicyState({"h": (3, v)}),
        NATURAL,
        "PolicyState needs every size in the shape of h as an integer",
    ),
    (
        lambda v: tw.PolicyState({"h": ()}, v),
        {TypeError: ("float32", None, 3)},
        "PolicyState needs a torch.dtype",
    ),
    (
        lambda v: tw.PolicyState({"h": ()}, torch.uint8, v),
        {**FILL, ValueError: (0.5, 300, -1)},
        f"PolicyState {UINT8}",
    ),
    (
        lambda v: tw.PolicyState({"h": ()}, fill=v),
        {**FILL, ValueError: (1e300,)},
        f"PolicyState {FLOAT32}",
    ),
    (
        T.ObservationGroups,
        {TypeError: (None, [ONE], {1: []})},
        "ObservationGroups needs a dict of lists of transforms",
    ),
    (
        T.ObservationGroups,
        {ValueError: ({},)},
        "ObservationGroups needs at least one group, but got none",
    ),
    (
        T.ObservationKeys,
        {TypeError: (None, [ONE])},
        "ObservationKeys needs a dict of lists of transforms",
    ),
]

CASES = [
    (make, v, error, start)
    for make, wrong, start in NUMBERS + OTHERS
    for error, values in wrong.items()
    for v in values
]


def test_transform_with_an_invalid_argument_raises():
    for make, value, error, start in CASES:
        with pytest.raises((TypeError, ValueError)) as raised:
            make(value)
            pytest.fail(f"{start}: {value!r} is accepted")
        message = str(raised.value)
        assert type(raised.value) is error and message.startswith(start), (
            f"{start}: {value!r}: {message}"
        )
        is_flag = start.endswith("as a bool") and isinstance(value, np.bool_)
        given = "NumPy's " * is_flag + validation.shown(value)
        both = " and ".join(map(validation.shown, value)) if isinstance(value, tuple) else given
        assert "but got" in start or message.endswith(
            (f", but got {given}.", f", but got {both}.")
        ), message


def test_every_transform_with_arguments_has_cases():
    with_arguments = {
        name
        for name in [*T.__all__, "PolicyState"]
        if {*inspect.signature(getattr(T, name, tw.PolicyState)).parameters} - {"args", "kwargs"}
    }
    assert with_arguments == {start.split()[0] for _, _, _, start in CASES}


def test_arguments_of_numpy_and_at_the_ends_of_their_ranges_are_accepted():
    for arguments in ((0,), (1,), (0.5, 1e-30), (0.5, 2)):
        T.NormalizeReward(*arguments)
    T.FrameStackObservation(np.int64(2))
    T.RecordEpisodeStatistics(np.int64(2))
    T.StickyAction(0, (2, 2))
    for value in (1, 7, np.int64(7), np.uint8(1), np.array(7), torch.tensor(7), 2**63 - 1):
        assert (
            type(T.TimeLimit(value).max_episode_steps) is int
            and T.TimeLimit(value).max_episode_steps == value
        )
    for value in (
        0,
        1,
        0.5,
        np.float32(0.5),
        np.int64(1),
        np.array(0.5),
        torch.tensor(0.5),
        Fraction(1, 4),
    ):
        assert (
            type(T.NormalizeReward(value).gamma) in (int, float)
            and T.NormalizeReward(value).gamma == value
        )
    assert (
        T.ClipObservation(-INF, 2**70).min_obs == -INF
        and type(T.ClipObservation(0, 2**70).max_obs) is float
    )
