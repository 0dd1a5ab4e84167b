"""The table of examples: GPT-2 shapes without norms and biases, relative to twelve plain blocks."""

from fractions import Fraction

import pytest

from deepen.errors import ProgramError
from deepen.program import Ends, LayerCost, Program, cost

D, CONTEXT, BLOCK, WORK = 768, 1024, 7_077_888, 17_301_504
LAYER = LayerCost(
    params={"a": 4 * D * D, "f": 8 * D * D},
    flops={"a": 8.0 * D * D, "f": 16.0 * D * D},
    flops_per_key=4.0 * D,
    cache=lambda context: 3072 * context,
    kv_flops=4.0 * D * D,
    linears={"a": [(D, D)] * 4, "f": [(D, 4 * D), (4 * D, D)]},
    width=D,
)
NONE = Ends(0, 0)


def costed(text: str, computed: bool = False, depth: int = 12, ends: Ends = NONE, layer: LayerCost = LAYER, **more):
    plan = Program.parse(text).plan(depth, ["af"] * depth)
    return cost(plan, [layer] * depth, ends, CONTEXT, kv_shared_computed=computed, **more)


@pytest.mark.parametrize(
    ("text", "params", "visits", "path", "flops", "slots", "cache"),
    [
        ("0-11", 1, 12, 12, 1, 12, 36864),
        ("0-5 9-11", 0.75, 9, 9, 0.75, 9, 27648),
        ("0-3 (4-7)*3 8-11", 1, 20, 20, 1.6667, 20, 61440),
        ("0-3 (4-7)*3[kv=first] 8-11", 1, 20, 20, 1.5758, 12, 36864),
        ("(0-5)*!2", 1, 12, 12, 1, 12, 36864),
        ("0-3 3!zero 4-7 7!zero 8-11 11!zero", 1.25, 15, 15, 1.25, 15, 46080),
        ("11-0", 1, 12, 12, 1, 12, 36864),
        ("0-5 6-11/2 7-11/2", 1, 12, 12, 1, 12, 36864),
        ("0-3 {4|5} {6.a|6.f} 7-11", 1, 13, 10.5, 1, 12, 36864),
        ("0-7 {8.a 9.a|_} {8.f|9.f|10.f} 11", 0.9722, 14, 10.5, 0.9621, 11, 33792),
        ("0-7 8.f 9.a 10-11", 0.9167, 12, 11, 0.9167, 11, 33792),
        ("0 (1-3)*3[lora=8,emb] 10-11", 0.5117, 12, 12, 1.0096, 12, 36864),
        ("0-1 @e (2-5)*1 6-7 ?main", 0.6667, 8, 8, 0.6667, 8, 24576),
        ("0-1 @e (2-5)*16 6-7 ?main", 0.6667, 68, 68, 5.6667, 68, 208896),
        ("0-2 (3-8)*4[res=1/8:1/4:1/2:1] 9-11", 1, 30, 30, 1.3878, 30, 52992),
        ("0-3 ?e4[conf=0.9] 4-7 ?e8[conf=0.9] 8-11", 1, 12, 12, 1, 12, 36864),
        ("0 (1-10)[cap=1/8] 11", 1, 12, 12, 0.2543, 12, 9984),
        ("0-1 (2-5)*3[cap=1:1/2:1/4,route=token] 10-11", 0.6667, 16, 16, 0.8902, 16, 33792),
        ("0-4 (5-7)[scale=1/2]*2[kv=first] 8-11", 1, 15, 15, 1.2159, 12, 36864),
        ("0-2 {3-6|7-10} 11", 1, 12, 8, 1, 12, 36864),
        ("(0-5)!b 0-5 ^1 3!b", 1.0833, 14, 14, 1.1667, 14, 43008),
        ("(0-11)*2", 1, 24, 24, 2, 24, 73728),
        ("0-11 (8-11)*2[when=decode,kv=none]", 1, 20, 20, 1.6667, 12, 36864),
        ("0-2 (3-8)[solve=idn:2] 9-11", 1, 12, 8, 1.5, 12, 36864),
        ("0-2 (3-8)[solve=gs] 9-11", 1, 12, 12, 1, 12, 36864),
    ],
)
def test_the_table(text, params, visits, path, flops, slots, cache):
    made = costed(text)
    assert made.params / (12 * BLOCK) == pytest.approx(params, abs=1e-4)
    assert (made.visits, made.path, made.slots) == (visits, Fraction(path), slots)
    assert made.flops / (12 * WORK) == pytest.approx(flops, abs=1e-4)
    assert made.cache_bytes == cache * CONTEXT
    assert made.context == CONTEXT


def test_layers_are_exact_fractions_of_the_bank():
    assert costed("0-11").layers == 12
    assert costed("(0-3)*5").layers == 4
    assert costed("0-7 8.f 9.a 10-11").layers == 11
    assert costed("0.a").layers == Fraction(1, 3)
    assert costed("0.f 0.f").layers == Fraction(2, 3)
    assert costed("0.a 0.f 0").layers == 1
    assert costed("0 0!").layers == 2


def test_inject_concat_owns_one_matrix_inside_a_loop_and_one_a_turn_on_it():
    plain = costed("0-1 @e (2-5)*16 6-7")
    inside = costed("0-1 @e (2-5)[inject=e:concat]*1..16[grad=8] 6-7")
    on_it = costed("0-1 @e (2-5)*16[inject=e:concat] 6-7")
    assert inside.params - plain.params == 2 * D * D
    assert on_it.params - plain.params == 16 * 2 * D * D
    assert inside.flops - plain.flops == on_it.flops - plain.flops == 16 * 4 * D * D
    assert costed("@e (0)[inject=e]").params == BLOCK


def test_counts_choose_the_work_and_leave_the_memory_at_the_maximum():
    text = "0-1 @e (2-5)[inject=e:concat]*1..32 6-7"
    few, many = costed(text, counts={0: 1}), costed(text)
    assert (few.visits, few.path, many.visits, many.path) == (8, 8, 132, 132)
    assert (few.params, few.slots, few.cache_bytes) == (many.params, many.slots, many.cache_bytes)
    assert few.flops == costed("0-1 @e (2-5)[inject=e:concat] 6-7").flops
    with pytest.raises(ProgramError, match="33 turns"):
        costed(text, counts={0: 33})


def test_shared_keys_and_values_are_counted_as_computed_unless_told_otherwise():
    text = "0-3 (4-7)*3[kv=first] 8-11"
    assert costed(text, computed=True).flops == 20 * WORK
    assert costed(text).flops == 20 * WORK - 8 * 4 * D * D
    assert costed("0[kv=x] 1[kv=x]").flops == 2 * WORK - 4 * D * D
    assert costed("0[kv=none]*2").flops == 2 * WORK


def test_adapters_are_shared_inside_a_loop_and_one_a_turn_on_it():
    linear = 13824 * 8
    assert costed("(1-3)*3[lora=8]").params - 3 * BLOCK == 9 * linear
    assert costed("(1-3)[lora=8]*3").params - 3 * BLOCK == 3 * linear
    assert costed("((1-3)*3)[lora=8]").params - 3 * BLOCK == 3 * linear
    # other enclosing loops share
    assert costed("((1*2)*3[lora=8])*5").params - BLOCK == 3 * linear
    assert costed("(1-3)*3[lora=8]").flops == 9 * (WORK + 2 * linear)
    assert costed("1.a[lora=8]").params == 4 * D * D + 8 * 4 * 2 * D
    # the adapter nearest to the visit holds
    assert costed("(1[lora=4] 2)[lora=8]").params - 2 * BLOCK == linear * 3 // 2
    bare = LayerCost({"a": 1, "f": 1}, {"a": 1, "f": 1}, 0, lambda context: 0)
    with pytest.raises(ProgramError, match="lora has no cost: the shapes of the linears of layer 1 are not known"):
        costed("1[lora=8]", layer=bare)


def test_what_attributes_own():
    for text, params, work in [
        ("0*3[emb]", 3 * D, 0),
        ("(0*3)[emb]", D, 0),
        ("(0[emb])*3", D, 0),
        ("0[norm]", D, 0),
        ("0[gate=scalar]", 1, 0),
        ("0[gate=vector]", D, 0),
        ("0[gate=token]", D + 1, 2 * D),
        ("{0|_}[comb=gate]", 2, 0),
        ("{0|_}[comb=mean]", 0, 0),
    ]:
        made = costed(text)
        assert made.params - BLOCK == params, text
        assert made.flops - made.visits * WORK == work, text


def test_the_router_of_a_cap_counts_on_every_token():
    made = costed("0[cap=1/2]")
    assert made.params == BLOCK + D
    assert made.flops == (24 * D * D + 4 * D * 512) / 2 + 2 * D
    nested = costed("((0)[cap=1/2])[res=1/4]")
    assert nested.flops == (24 * D * D + 4 * D * 128) / 8 + 2 * D / 4
    assert nested.cache_bytes == 3072 * 128


def test_a_slot_that_turns_of_several_resolutions_share_holds_the_finest():
    assert costed("(0)*2[kv=first,res=1:1/2]").cache_bytes == costed("0").cache_bytes
    assert costed("(0)*2[kv=first,res=1/4:1/2]").cache_bytes == 3072 * 512


def test_ends_and_exits():
    ends = Ends(params=1000, flops=500, head_flops=300, head_params=200)
    assert costed("0", ends=ends).params == BLOCK + 1000
    assert costed("0 ?x 1 ?y[conf=0.9] 2 ?z[conf=inf]", ends=ends).flops == 3 * WORK + 500 + 300
    assert costed("(0 ?x[conf=0.9])*3", ends=ends).flops == 3 * WORK + 500 + 900
    assert costed("0 ?x[head=own,norm=own]", ends=ends).params == BLOCK + 1000 + 200 + D
    assert costed("0 ?x[head=own]", ends=ends).params == BLOCK + 1200


def test_windows_and_states_are_the_layers_own():
    window = LayerCost(
        {"a": 10, "f": 20}, {"a": 1.0, "f": 2.0}, 1.0, lambda t: 2 * min(t, 100), keys=lambda t: min(t, 100)
    )
    plan = Program.parse("0 1.a 0").plan(2, ["af", "af"])
    made = cost(plan, [window, LAYER], NONE, CONTEXT)
    assert made.flops == 2 * 103 + 8 * D * D + 4 * D * CONTEXT
    assert made.cache_bytes == 400 + 3072 * CONTEXT
    with pytest.raises(ValueError, match="1 layer costs for 2 layers"):
        cost(plan, [window], NONE, CONTEXT)


def test_a_layer_of_one_part_is_a_whole_layer_of_the_path():
    mixer = LayerCost({"a": 10}, {"a": 1.0}, 0.0, lambda context: 64)
    plan = Program.parse("0-1").plan(2, ["a", "a"])
    made = cost(plan, [mixer] * 2, NONE, 4096)
    assert (made.path, made.layers, made.cache_bytes) == (2, 2, 128)
