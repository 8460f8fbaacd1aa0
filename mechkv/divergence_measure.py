"""What do the two paths write for one prompt, and how do their next-token distributions differ on the same text?

Two clocks, never mixed. **Teacher-forced**: both paths are fed the tokens that the cached path chose; every row of
`steps` compares two distributions for the same context. **Free-running**: each path feeds itself. Up to the first
different choice both clocks see the same contexts, so one lockstep walk gives the cached path's text, the
teacher-forced rows and the recomputed path's text as far as they agree; from there the recomputed path is decoded on
its own. It carries no state from step to step, so it may start at any token: the text is that of an undisturbed run.

Choice i is made from the logits of step i; choice 0 comes from the prompt, where the drift is exactly zero, so it never
differs. Beside the choice with common random numbers stand two others at every step: `differs_independent`, the
recomputed path's with draws of its own, and `differs_noise`, the *cached* path's with other draws, which has no drift
at all. Their first steps are exact first divergence indices of free-running runs with such draws.

`recompute="block"` replaces the full pass a step by the last `BLOCK` rows as one block on the recomputed path's own
K/V; a full pass a step is the definition and the default. Where the rows of older tokens do not change with the length
(bfloat16 and float32 on the CPUs it was tried on, not float16) both give the same bits. Step 0, the same call on both
paths, is then done once for both and for all strategies; a full pass at the last step must give the same bits in the
logits and in every row of K and V, the prompt's included, or it is a `GuardError`.

Controls: step 0 exactly zero; a sample of steps done twice, bitwise; the flip certificate on every row.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv import guards
from mechkv.cache import KVState
from mechkv.comparison import compare_logits
from mechkv.errors import GuardError, InputError
from mechkv.guards import GuardLog
from mechkv.paths import PathRunner, Step, decode, lockstep
from mechkv.policies import Coupling, Forced, Noted, Sampled, Strategy, TokenPolicy
from mechkv.stats import rng

BLOCK = 8
RECOMPUTE = ("full", "block")


@dataclass(frozen=True)
class Generation:
    """What one path wrote: tokens after the prompt, the probability of the top token at each, whether a stop token
    ended it."""

    tokens: list[int] = field(default_factory=list)
    top1_prob: list[float] = field(default_factory=list)
    ended: bool = False


@dataclass(frozen=True)
class PromptDivergence:
    """One prompt under one strategy.

    Attributes:
        steps: A row per teacher-forced step.
        cached, recomputed: The two texts.
        first: Index of the first different choice with common, independent and noise draws; None where there is none.
        guards: How often each guard ran.
    """

    steps: list[dict[str, Any]]
    cached: Generation
    recomputed: Generation
    first: dict[str, int | None]
    guards: dict[str, int]


def measure_prompt(
    model: TransformerBridge,
    prompt: Int[Tensor, "pos"],
    strategy: Strategy,
    *,
    n_tokens: int,
    seed: int = 0,
    label: int | str = 0,
    stop: tuple[int, ...] = (),
    coupling: Coupling = "uniform",
    n_repeats: int = 1,
    start: Step | None = None,
    verify: bool = True,
) -> PromptDivergence:
    """Both clocks on one prompt: at most `n_tokens` tokens a path, fewer where a stop token ends it.

    With `start`, the prompt's step 0 (`prefill`), the recomputed path goes on by blocks; `verify` ends with a full
    pass.
    """
    names = {"seed": seed, "prompt": label, "stop": stop, "coupling": coupling}
    shared = Sampled(strategy, **names)  # type: ignore[arg-type]
    draws = {name: Sampled(strategy, stream=name, **names) for name in ("independent", "noise")}  # type: ignore[arg-type]
    log, steps, ours, theirs = GuardLog(), [], Generation(), Generation()
    first: dict[str, int | None] = dict.fromkeys(("common", "independent", "noise"))
    repeated = set(rng(seed, "repeat", label).permutation(n_tokens)[:n_repeats].tolist())
    walk = _walk(model, prompt, Sampled(strategy, **names), n_tokens - 1, start, log)  # type: ignore[arg-type]
    tail_from = None
    try:
        for cached, recomputed in walk:
            if cached.index in repeated:
                _repeat(model, cached, recomputed, log)
            row = _row(cached, recomputed, shared, draws)
            steps.append(row)
            for name, column in (("common", "differs"), *((d, f"differs_{d}") for d in draws)):
                if row[column] and first[name] is None:
                    first[name] = row["step"]
            if first["common"] is None or first["common"] == row["step"]:
                theirs.tokens.append(row["chosen_recomputed"])
                theirs.top1_prob.append(row["top1_prob_recomputed"])
            if first["common"] == row["step"]:
                tail_from = cached.tokens
            ours.tokens.append(row["chosen_cached"])
            ours.top1_prob.append(row["top1_prob_cached"])
            if row["chosen_cached"] in shared.stop:
                break
        if start is not None and verify and cached.index:
            _verify(model, recomputed, log)
    finally:
        walk.close()  # type: ignore[attr-defined]
    if tail_from is not None:
        fed = torch.cat([tail_from, tail_from.new_tensor(theirs.tokens[-1:])])
        _tail(model, fed, Sampled(strategy, **names), n_tokens, theirs, start is None, log)  # type: ignore[arg-type]
    ends = [bool(g.tokens) and g.tokens[-1] in shared.stop for g in (ours, theirs)]
    return PromptDivergence(
        steps,
        Generation(ours.tokens, ours.top1_prob, ends[0]),
        Generation(theirs.tokens, theirs.top1_prob, ends[1]),
        first,
        dict(log),
    )


def prefill(model: TransformerBridge, prompt: Int[Tensor, "pos"], log: GuardLog) -> Step:
    """Step 0, for the block variant."""
    (step,) = decode(model, prompt, path="cached", policy=Forced([]), n_steps=0, log=log)
    return step


def _walk(
    model: TransformerBridge, prompt: Tensor, policy: Sampled, n_steps: int, start: Step | None, log: GuardLog
) -> Iterator[tuple[Step, Step]]:
    """Both paths in lockstep; by blocks from `start`, where one is given."""
    if start is None:
        yield from lockstep(model, prompt, policy=policy, n_steps=n_steps, log=log)
        return
    chosen = prompt.tolist()
    cached = _go_on(model, start, Noted(policy, chosen), n_steps, 1, log)
    recomputed = _go_on(model, start, Forced(chosen, chunk=None), n_steps, BLOCK, log)
    try:
        yield from zip(cached, recomputed, strict=True)
    finally:
        cached.close()
        recomputed.close()


def _go_on(
    model: TransformerBridge, start: Step, policy: TokenPolicy, n_steps: int, n_rows: int, log: GuardLog
) -> Generator[Step, None, None]:
    """The steps after `start`, each computing the last `n_rows` rows on the K/V of the rows before them."""
    yield start
    step = start
    with PathRunner(model, "cached", log=log) as runner:
        for index in range(1, n_steps + 1):
            new = policy.next_tokens(step.logits, len(step.tokens))
            if not new:
                return
            tokens = torch.cat([step.tokens, step.tokens.new_tensor(new)])
            step = runner.step(tokens, _cut(step.kv, len(tokens) - n_rows), index)
            yield step


def _cut(state: KVState, n_tokens: int) -> KVState:
    """The state after its first `n_tokens` tokens."""
    if n_tokens < 1 or any(state.first_position(layer) for layer in range(len(state.keys))):
        raise InputError(
            "the block variant cannot be used here",
            got=f"{n_tokens} tokens before the block, or a window that has dropped rows",
            expected=f"prompts of more than {BLOCK} tokens and every row still held",
            remedy="Use recompute='full'.",
        )
    if n_tokens == state.n_tokens:
        return state
    keys, values = (tuple(rows[:, :n_tokens] for rows in side) for side in (state.keys, state.values))
    return KVState(keys, values, n_tokens, state.n_prompt)


def _verify(model: TransformerBridge, step: Step, log: GuardLog) -> None:
    """A full pass over the same tokens gives the same bits: logits, and K/V of all rows."""
    with PathRunner(model, "recomputed", log=log) as runner:
        full = runner.step(step.tokens, KVState.empty(step.kv.n_prompt), step.index, len(step.tokens))
    pairs = [(step.logits, full.logits), *zip(step.kv.keys, full.kv.keys, strict=True)]
    pairs += zip(step.kv.values, full.kv.values, strict=True)
    if not all(torch.equal(x, y) for x, y in pairs):
        raise GuardError(
            "rows computed as a block are not those of the full pass",
            got=f"a difference at step {step.index}, {len(step.tokens)} tokens",
            expected="the same bits",
            remedy="Use recompute='full': the block variant does not hold for this dtype or these kernels.",
        )
    log["block_is_full_pass"] += 1


def _repeat(model: TransformerBridge, cached: Step, recomputed: Step, log: GuardLog) -> None:
    """Both halves of a step again, from the same state."""
    for step in (cached, recomputed):
        with PathRunner(model, step.path, log=log) as runner:
            again = runner.step(step.tokens, step.kv_before, step.index, step.n_new)
        guards.check_repeat(step, again, log)


def _tail(
    model: TransformerBridge,
    fed: Tensor,
    policy: Sampled,
    n_tokens: int,
    written: Generation,
    full: bool,
    log: GuardLog,
) -> None:
    """The recomputed path on its own tokens, from its first own choice on."""
    left = n_tokens - len(written.tokens)
    if left < 1 or written.tokens[-1] in policy.stop:
        return
    run = (
        decode(model, fed, path="recomputed", policy=policy, n_steps=left - 1, log=log)
        if full
        else _go_on(model, prefill(model, fed, log), policy, left - 1, BLOCK, log)
    )
    for step in run:
        token = policy.choose(step.logits, len(step.tokens))
        written.tokens.append(token)
        written.top1_prob.append(_top1_prob(step.logits))
        if token in policy.stop:
            break
    run.close()


def _row(cached: Step, recomputed: Step, shared: Sampled, draws: dict[str, Sampled]) -> dict[str, Any]:
    """One teacher-forced step: metrics of the two distributions, and what each path would choose."""
    n, a, b = len(cached.tokens), cached.logits, recomputed.logits
    ours, theirs = shared.choose(a, n), shared.choose(b, n)
    row = {
        "step": cached.index,
        "position": n - 1,
        "token": int(cached.tokens[-1]),
        "chosen_cached": ours,
        "chosen_recomputed": theirs,
        "differs": ours != theirs,
        "differs_independent": ours != draws["independent"].choose(b, n),
        "differs_noise": ours != draws["noise"].choose(a, n),
        "top1_prob_cached": _top1_prob(a),
        "top1_prob_recomputed": _top1_prob(b),
        "gap_shift": gap_shift(a, b),
    }
    return row | compare_logits(a, b).to_dict()


def _top1_prob(logits: Float[Tensor, "d_vocab"]) -> float:
    return float(torch.softmax(logits.double(), 0).max())


def gap_shift(z_a: Float[Tensor, "d_vocab"], z_b: Float[Tensor, "d_vocab"]) -> float:
    """By how much the gap between the recomputed path's two top tokens is another one on the cached path."""
    first, second = z_b.topk(2).indices.tolist()
    a, b = z_a.double(), z_b.double()
    return float((a[first] - a[second]) - (b[first] - b[second]))
