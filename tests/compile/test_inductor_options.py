"""Options that compile chooses for Inductor."""

from __future__ import annotations

import pytest
import torch

import torchwrap as tw
from torchwrap import transforms as T
from torchwrap._compile import inductor
from torchwrap.testing import ScriptedEnv


@pytest.mark.parametrize(
    ("shape", "bits", "short"),
    [
        ((17,), 512, True),  # the rest is 1 of 16 lanes
        ((11,), 512, False),  # 11 of 16
        ((16,), 512, False),
        ((1,), 512, False),
        ((4,), 512, False),  # one vector, of which 4 lanes are used
        ((64,), 512, False),  # one number per env, not what envs share
        ((64, 4, 17), 512, True),
        ((64, 17), 512, False),
        ((11,), 256, True),
        ((4,), 256, False),
        ((3,), 256, False),
        ((17,), 256, True),
        ((16,), 0, True),
    ],
    ids=str,
)
def test_tails_are_short_if_they_fill_less_than_half_of_a_vector_behind_others(shape, bits, short):
    assert inductor._has_short_tails([torch.zeros(shape)], 64, bits) == short


@pytest.mark.parametrize("given", [{}, {"cpp.enable_loop_tail_vec": True}, {"cpp.simdlen": 256}])
def test_chosen_options_give_way_to_those_of_the_caller(given, monkeypatch):
    chosen = []

    def compiler(graph, inputs, options):
        chosen.append(options)
        return lambda *tensors: graph(*tensors)

    monkeypatch.setattr(torch._inductor, "compile", compiler)
    monkeypatch.setattr(inductor, "_vector_bits", lambda options: options.get("cpp.simdlen", 512))
    tw.compile(tw.TransformedEnv(ScriptedEnv(2, (11,)), T.NormalizeObservation()), options=given)
    expected = {} if given == {} else {"cpp.enable_loop_tail_vec": False} | given
    assert chosen and all({key: options[key] for key in expected} == expected for options in chosen)
    assert all(("cpp.enable_loop_tail_vec" in options) == bool(given) for options in chosen)


def test_width_of_vectors_follows_the_options():
    assert inductor._vector_bits({"cpp.simdlen": 1}) == 0
    widths = {isa.bit_width() for isa in torch._inductor.cpu_vec_isa.valid_vec_isa_list()}
    assert inductor._vector_bits({}) == max(widths, default=0)
    assert {inductor._vector_bits({"cpp.simdlen": width}) for width in widths} == widths


def test_rules_for_dtypes_are_made_once_per_graph(monkeypatch):
    from torch._inductor.codegen import common
    from torch._inductor.utils import fresh_cache

    rules, made = common.DtypePropagationOpsHandler, []
    monkeypatch.setattr(rules, "__init__", lambda self, original=rules.__init__: (made.append(self), original(self))[1])
    with fresh_cache():
        tw.compile(ScriptedEnv(2))
    assert len(made) == 1 and common.DtypePropagationOpsHandler is rules
