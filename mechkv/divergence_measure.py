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

Controls: step 0 exactly zero; a sample of steps done twice, bitwise; the flip certificate on every row.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv import guards
from mechkv.comparison import compare_logits
from mechkv.guards import GuardLog
from mechkv.paths import PathRunner, Step, decode, lockstep
from mechkv.policies import Coupling, Sampled, Strategy
from mechkv.stats import rng


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
) -> PromptDivergence:
    """Both clocks on one prompt: at most `n_tokens` tokens a path, fewer where a stop token ends it."""
    names = {"seed": seed, "prompt": label, "stop": stop, "coupling": coupling}
    shared = Sampled(strategy, **names)  # type: ignore[arg-type]
    draws = {name: Sampled(strategy, stream=name, **names) for name in ("independent", "noise")}  # type: ignore[arg-type]
    log, steps, ours, theirs = GuardLog(), [], Generation(), Generation()
    first: dict[str, int | None] = dict.fromkeys(("common", "independent", "noise"))
    repeated = set(rng(seed, "repeat", label).permutation(n_tokens)[:n_repeats].tolist())
    policy = Sampled(strategy, **names)  # type: ignore[arg-type]
    walk = lockstep(model, prompt, policy=policy, n_steps=n_tokens - 1, log=log)
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
    finally:
        walk.close()  # type: ignore[attr-defined]
    if tail_from is not None:
        fed = torch.cat([tail_from, tail_from.new_tensor(theirs.tokens[-1:])])
        _tail(model, fed, Sampled(strategy, **names), n_tokens, theirs, log)  # type: ignore[arg-type]
    ends = [bool(g.tokens) and g.tokens[-1] in shared.stop for g in (ours, theirs)]
    return PromptDivergence(
        steps,
        Generation(ours.tokens, ours.top1_prob, ends[0]),
        Generation(theirs.tokens, theirs.top1_prob, ends[1]),
        first,
        dict(log),
    )


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
    log: GuardLog,
) -> None:
    """The recomputed path on its own tokens, from its first own choice on."""
    left = n_tokens - len(written.tokens)
    if left < 1 or written.tokens[-1] in policy.stop:
        return
    run = decode(model, fed, path="recomputed", policy=policy, n_steps=left - 1, log=log)
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
