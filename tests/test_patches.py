"""Predictions of the patching engine on tiny models: no-ops are bitwise, everything is the other path, writes land."""

from dataclasses import dataclass, replace

import pytest
import torch

from mechkv.cache import KVState
from mechkv.errors import GuardError, InputError
from mechkv.guards import GuardLog, same_bits
from mechkv.interventions import Board, Patch, check_landed
from mechkv.kv_difference import Place, localise_kv
from mechkv.patch_bench import PatchBench, distances, recovery
from mechkv.paths import At, PathRunner
from mechkv.placebos import noise, one_ulp, shuffled
from mechkv.policies import Greedy
from mechkv.sources import ForeignSource, Held, Pair, RecordSource, StepSource, TensorSource, inherited, pairs
from tests.tiny import WINDOW, tiny_bridge, tokens

KV = ("cache_k", "cache_v")
FAMILIES = ("llama-gqa", "mistral-window", "gemma3", "gpt2")
N_PROMPT, STEP = 11, 4


@dataclass
class Case:
    """One step of both paths, with a bench for each."""

    model: object
    pair: Pair
    cached: PatchBench
    recomputed: PatchBench
    log: GuardLog

    def bench(self, path):
        return self.cached if path == "cached" else self.recomputed


def case_of(family, dtype, seed=0):
    model, log = tiny_bridge(family, dtype=dtype), GuardLog()
    *_, pair = pairs(model, tokens(N_PROMPT, seed), policy=Greedy(), n_steps=STEP, log=log)
    return Case(model, pair, PatchBench(model, "cached", log=log), PatchBench(model, "recomputed", log=log), log)


@pytest.fixture(params=[(f, d) for f in FAMILIES for d in (torch.float64, torch.float32)], ids=str, scope="module")
def case(request):
    made = case_of(*request.param)
    with made.cached, made.recomputed:
        yield made


@pytest.fixture(scope="module")
def llama():
    made = case_of("llama-gqa", torch.float32)
    with made.cached, made.recomputed:
        yield made


def everything(pair, source, into):
    rows = "all" if into == "cached" else "past"
    return (
        Patch(pair.source(source), into, KV, positions=rows),
        Patch(pair.source(source), into, ("resid_post",), positions="current"),
    )


def test_identity_patches_are_bitwise_no_ops(case):
    for path in ("cached", "recomputed"):
        base = case.pair.step(path)
        step = case.bench(path).patched(base, *everything(case.pair, path, path))
        assert same_bits(step.logits, base.logits)
        assert all(same_bits(a, b) for a, b in zip(step.kv.keys, base.kv.keys, strict=True))
        writes = case.bench(path).writes
        assert writes
        assert all(write.n_changed == 0 and write.n_written > 0 for write in writes)
        case.bench(path).again(base)


def test_patching_everything_gives_the_other_path(case):
    for into, source in (("cached", "recomputed"), ("recomputed", "cached")):
        base, other = case.pair.step(into), case.pair.step(source)
        step = case.bench(into).patched(base, *everything(case.pair, source, into))
        assert same_bits(step.logits, other.logits)
        case.bench(into).again(base)


def test_last_residual_restores_the_step_by_construction_and_the_one_before_does_not(llama):
    pair, last = llama.pair, len(llama.pair.cached.kv.keys) - 1
    assert not same_bits(pair.cached.logits, pair.recomputed.logits)
    for layer, restored in ((last, True), (last - 1, False)):
        patch = Patch(pair.source("recomputed"), "cached", ("resid_post",), layers=(layer,), positions="current")
        step = llama.cached.patched(pair.cached, patch)
        assert same_bits(step.logits, pair.recomputed.logits) is restored
        # nothing of the last layer's residual stays in the state
        kept = all(same_bits(a, b) for a, b in zip(step.kv.values, pair.cached.kv.values, strict=True))
        assert kept is restored


def test_a_patched_state_equals_a_step_from_that_state(case):
    """Writing the old rows during the pass is the same as starting from a state made of them."""
    pair = case.pair
    patch = Patch(pair.source("recomputed"), "cached", KV, positions="past")
    patched = case.cached.patched(pair.cached, patch)
    state = inherited(pair.rows("recomputed"), pair.cached.kv_before)
    started = case.cached.plain(pair.cached.tokens, state, pair.index)
    assert same_bits(patched.logits, started.logits)


def test_all_branch_outputs_are_the_other_path():
    """The residual stream is a sum: with every attention and MLP output of the other path it is the other path's."""
    model, branches, log = tiny_bridge("llama-gqa"), ("attn_out", "mlp_out"), GuardLog()
    *_, pair = pairs(model, tokens(N_PROMPT), policy=Greedy(), n_steps=2, sites=("resid_post", *branches))
    with PatchBench(model, "cached", sites=("resid_post", *branches), log=log) as bench:
        for sites, same in ((branches, True), (("mlp_out",), False)):
            patch = Patch(pair.source("recomputed"), "cached", sites, positions="current")
            assert same_bits(bench.patched(pair.cached, patch).logits, pair.recomputed.logits) is same


def test_windowed_layers_take_the_rows_that_they_can_see():
    made = case_of("mistral-window", torch.float32)
    with made.cached, made.recomputed:
        patch = Patch(made.pair.source("recomputed"), "cached", KV, positions="past")
        made.cached.patched(made.pair.cached, patch)
        assert {len(write.at.positions) for write in made.cached.writes} == {WINDOW}
        patch = Patch(made.pair.source("cached"), "recomputed", KV, positions="past")
        made.recomputed.patched(made.pair.recomputed, patch)
        per_row = made.pair.cached.kv.keys[0][:, 0].numel()
        assert {write.n_written for write in made.recomputed.writes} == {(WINDOW - 1) * per_row}
        short = Patch(made.pair.source("cached"), "recomputed", KV, positions=(N_PROMPT + STEP - WINDOW,))
        made.recomputed.patched(made.pair.recomputed, short)  # the first row in reach
        # beyond the reach the cached path has no row, and none is needed: nothing is written
        with pytest.raises(GuardError, match="no patch acted"):
            made.recomputed.patched(made.pair.recomputed, replace(short, positions=(0,)))


# ------------------------------------------------------------------------------------------------ what is written


def one_patch(llama, **changes):
    base = Patch(llama.pair.source("recomputed"), "cached", ("cache_k",), layers=(1,), positions="past")
    return replace(base, **changes)


def other_rows(llama, shift=0.5):
    """A source that differs from the cached path in every element."""
    held = llama.pair.rows("cached")
    return TensorSource({key: (h.value + shift, h.positions.start) for key, h in held.items()})


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ("all", range(N_PROMPT + STEP)),
        ("past", range(N_PROMPT + STEP - 1)),
        ("current", (N_PROMPT + STEP - 1,)),
        ("prefill", range(N_PROMPT)),
        ("decode", range(N_PROMPT, N_PROMPT + STEP - 1)),
        (range(3, 5), (3, 4)),
        ((2, 13), (2, 13)),
    ],
)
@pytest.mark.parametrize("heads", [None, (1,)])
def test_exactly_the_named_rows_and_heads_change(llama, positions, expected, heads):
    patch = one_patch(llama, source=other_rows(llama), positions=positions, kv_heads=heads, n_prompt=N_PROMPT)
    step = llama.cached.patched(llama.pair.cached, patch)
    before = torch.stack(list(llama.pair.cached.kv.keys))
    changed = (torch.stack(list(step.kv.keys))[:2] != before[:2]).all(-1)
    meant = torch.zeros_like(changed)
    for head in (0, 1) if heads is None else heads:
        meant[1, head, list(expected)] = True
    assert torch.equal(changed, meant)


def test_dose_zero_is_own_dose_one_is_the_source_and_between_is_between(llama):
    own, base = llama.pair.cached.kv.keys[1], llama.pair.cached
    source = other_rows(llama)
    theirs = source.tensors["cache_k", 1][0]
    for dose, expected in ((0.0, own), (1.0, theirs), (0.25, (0.75 * own.double() + 0.25 * theirs.double()).float())):
        step = llama.cached.patched(base, one_patch(llama, source=source, dose=dose, positions="all"))
        assert same_bits(step.kv.keys[1], expected)
    assert not same_bits(own, theirs)


def test_noise_has_the_norm_of_the_real_change_and_another_direction(llama):
    base = llama.pair.cached
    real = llama.cached.patched(base, one_patch(llama)).kv.keys[1].double() - base.kv.keys[1].double()
    hiss = llama.cached.patched(base, one_patch(llama, change=noise(0, "test"))).kv.keys[1].double()
    hiss -= base.kv.keys[1].double()
    norms = [torch.linalg.vector_norm(v, dim=(0, 2)) for v in (real, hiss)]
    assert norms[0].max() > 0
    assert torch.allclose(norms[0], norms[1], rtol=0.2, atol=0)
    cosine = float((real * hiss).sum() / (norms[0].norm() * norms[1].norm()))
    assert abs(cosine) < 0.5
    again = llama.cached.patched(base, one_patch(llama, change=noise(0, "test"))).kv.keys[1].double()
    assert torch.equal(again - base.kv.keys[1].double(), hiss)
    other = llama.cached.patched(base, one_patch(llama, change=noise(1, "test"))).kv.keys[1].double()
    assert not torch.equal(other - base.kv.keys[1].double(), hiss)


def test_shuffled_rows_are_the_same_rows_elsewhere(llama):
    step = llama.cached.patched(llama.pair.cached, one_patch(llama, change=shuffled(0)))
    rows = [
        r[:, : N_PROMPT + STEP - 1].movedim(1, 0).flatten(1)
        for r in (step.kv.keys[1], llama.pair.recomputed.kv.keys[1])
    ]
    same = (rows[0][:, None] == rows[1][None]).all(-1)
    assert torch.equal(same.sum(0), torch.ones(len(same), dtype=same.sum(0).dtype))
    assert not same.diagonal().any()


def test_one_ulp_moves_one_element_to_the_next_value(llama):
    patch = one_patch(llama, sites=("cache_v",), change=one_ulp((0, -1, 0)))
    step = llama.cached.patched(llama.pair.cached, patch)
    (write,) = llama.cached.writes
    assert write.n_changed == 1
    old, new = llama.pair.cached.kv.values[1][0, -2, 0], step.kv.values[1][0, -2, 0]
    assert new == torch.nextafter(old, old * 2)


def test_foreign_patch_is_the_other_prompts_difference(llama):
    *_, other = pairs(llama.model, tokens(7, 3), policy=Greedy(), n_steps=STEP)
    source = ForeignSource(other.source("recomputed"), other.source("cached"), shift=N_PROMPT - 7)
    step = llama.cached.patched(llama.pair.cached, one_patch(llama, source=source))
    own = llama.pair.cached.kv.keys[1]
    difference = other.recomputed.kv.keys[1].double() - other.cached.kv.keys[1].double()
    expected = own.clone()
    expected[:, N_PROMPT - 7 : -1] = (own[:, N_PROMPT - 7 : -1].double() + difference[:, :-1]).float()
    assert same_bits(step.kv.keys[1], expected)
    assert not same_bits(expected, own)


def test_a_recorded_run_is_a_source(llama):
    record = pytest.importorskip("mechkv.recording").record
    fed = llama.pair.cached.tokens
    run = record(llama.model, fed, n_prompt=N_PROMPT, path="recomputed", sites=("resid_post",), keep_states=True)
    for sites, positions in ((("resid_post",), "current"), (KV, "past")):
        patches = [
            Patch(source, "cached", sites, positions=positions)
            for source in (RecordSource(run), llama.pair.source("recomputed"))
        ]
        a, b = (llama.cached.patched(llama.pair.cached, patch) for patch in patches)
        assert same_bits(a.logits, b.logits)
    bare = record(llama.model, fed, n_prompt=N_PROMPT, path="recomputed", sites=("resid_post",))
    with pytest.raises(InputError, match="kept no KV states"):
        llama.cached.patched(llama.pair.cached, Patch(RecordSource(bare), "cached", KV, positions="past"))


# ------------------------------------------------------------------------------------------------------ the proof


class Overwriter:
    """Writes to a site after the patch did."""

    def __init__(self, site, layer):
        self.sites, self.layer = (site,), layer

    def __call__(self, value, at):
        return value * 1.5 if at.layer == self.layer else None


@pytest.mark.parametrize(
    ("site", "layer", "message"),
    [
        ("cache_k", 1, "did not land"),
        ("resid_post", 1, "did not land"),
        ("cache_v", 0, "something else"),
        ("cache_v", 2, "something else"),
        ("resid_post", 0, "something else"),
    ],
)
def test_the_proof_sees_a_write_that_is_not_the_patch(llama, site, layer, message):
    pair, board = llama.pair, Board(("resid_post", *KV))
    source = pair.source("recomputed")
    board.arm(
        Patch(source, "cached", ("cache_k",), layers=(1,), positions="past"),
        Patch(source, "cached", ("resid_post",), layers=(1,), positions="current"),
    )
    both = (board, Overwriter(site, layer))
    for interventions, clean in (((board,), True), (both, False)):
        board.writes.clear()
        with PathRunner(llama.model, "cached", sites=("resid_post",), interventions=interventions) as runner:
            step = runner.step(pair.cached.tokens, pair.cached.kv_before, pair.index)
        if clean:
            check_landed(step, board.writes, pair.cached, GuardLog())
        else:
            with pytest.raises(GuardError, match=message):
                check_landed(step, board.writes, pair.cached, GuardLog())


def test_a_change_that_spills_is_caught(llama):
    def spill(self, value, at):
        return value + 1 if at.site == "cache_k" and at.layer == 1 else None

    patch = one_patch(llama)
    wild = type("Wild", (Patch,), {"__call__": spill})(**vars(patch))
    with pytest.raises(GuardError, match="wrote more than it named"):
        llama.cached.patched(llama.pair.cached, wild)


def test_source_and_destination_are_as_they_were(llama):
    before = [llama.pair.source(path).digest() for path in ("cached", "recomputed")]
    for path, other in (("cached", "recomputed"), ("recomputed", "cached")):
        llama.bench(path).patched(llama.pair.step(path), *everything(llama.pair, other, path))
    assert before == [llama.pair.source(path).digest() for path in ("cached", "recomputed")]
    moved = StepSource(replace(llama.pair.cached, logits=llama.pair.cached.logits + 1), {})
    assert moved.digest() != StepSource(llama.pair.cached, {}).digest()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"into": "cache"}, "unknown path"),
        ({"sites": ("logits",)}, "cannot be patched"),
        ({"dose": 1.5}, "dose"),
        ({"positions": "old"}, "positions"),
        ({"positions": "prefill"}, "prompt length"),
        ({"sites": ("resid_post",), "kv_heads": (0,)}, "KV heads"),
    ],
)
def test_patches_that_make_no_sense_are_refused(llama, changes, message):
    with pytest.raises(InputError, match=message):
        one_patch(llama, **changes)


def test_refusals_while_running(llama):
    own = llama.pair.rows("cached")["cache_k", 1]
    bad = [
        (one_patch(llama, into="recomputed"), "wrong path"),
        (one_patch(llama, kv_heads=(2,)), "KV heads"),
        (one_patch(llama, source=TensorSource({})), "has nothing"),
        (one_patch(llama, source=TensorSource({("cache_k", 1): (own.value.double(), 0)})), "another kind of tensor"),
        (one_patch(llama, source=TensorSource({("cache_k", 1): (own.value[:, 2:], 2)})), "lacks rows"),
    ]
    for patch, message in bad:
        with pytest.raises(InputError, match=message):
            llama.cached.patched(llama.pair.cached, patch)


# ---------------------------------------------------------------------------------------------------- localisation


@pytest.mark.parametrize(
    ("dtype", "site", "layer", "head", "position"),
    [(torch.float64, "cache_k", 1, 1, 6), (torch.float32, "cache_v", 2, 0, 12)],
)
def test_a_planted_corruption_is_localised_exactly(dtype, site, layer, head, position):
    made = case_of("llama-gqa", dtype)
    clean = made.pair.cached
    with made.cached:
        bad = corrupted(clean.kv_before, site, layer, head, position)
        base = made.cached.plain(clean.tokens, bad, clean.index)
        found = localise_kv(made.cached, base, made.pair.source("cached"), clean)
        assert found.places == (Place(site, layer, head, position),)
        partly = found.frame[(found.frame["grain"] == "layer") & ~found.frame["equals_source"]]
        assert (partly["recovery"].abs() < 0.5).all()
        # two places: neither alone restores the logits
        worse = made.cached.plain(clean.tokens, corrupted(bad, "cache_v", 0, 0, 3), clean.index)
        assert localise_kv(made.cached, worse, made.pair.source("cached"), clean).places == ()
        with pytest.raises(InputError, match="nothing to localise"):
            localise_kv(made.cached, clean, made.pair.source("cached"), clean)


def corrupted(state: KVState, site: str, layer: int, head: int, position: int) -> KVState:
    keys, values = list(state.keys), list(state.values)
    rows = keys if site == "cache_k" else values
    rows[layer] = rows[layer].clone()
    rows[layer][head, position] += 0.25
    return KVState(tuple(keys), tuple(values), state.n_tokens, state.n_prompt)


# -------------------------------------------------------------------------------------------------------- recovery


def test_recovery_is_left_out_where_there_is_nothing_to_recover():
    assert recovery(1e-3, 4e-3, 1e-18) == 0.75
    assert recovery(4e-3, 1e-3, 1e-18) == -3.0
    for unpatched in (0.0, 1e-19, float("nan")):
        assert torch.tensor(recovery(0.0, unpatched, 1e-18)).isnan()


def test_distances_are_those_of_the_comparison_module(llama):
    from mechkv.comparison import compare, compare_logits

    a, b = llama.pair.cached.logits, llama.pair.recomputed.logits
    table = distances([a, b] * 6, b)
    assert table["kl"][0] == pytest.approx(compare_logits(a, b).kl, rel=1e-12)
    assert table["rel_l2"][0] == pytest.approx(compare(a, b).rel_l2, rel=1e-12)
    assert table["bitwise_equal"].tolist() == [False, True] * 6
    assert table["kl"][1::2].tolist() == [0.0] * 6


def test_held_rows_line_up_with_positions(llama):
    held = llama.pair.source("recomputed").held(torch.zeros(1), At("cached", STEP, "cache_v", 2, range(1), 0))
    assert isinstance(held, Held)
    assert held.positions == range(N_PROMPT + STEP)
    assert same_bits(held.value, llama.pair.recomputed.kv.values[2])
