"""The decode loop: one step of either path, and whole runs as generators of steps.

**cached**: step 0 processes the prompt, every later step the new tokens only, on the KV state of the step before.
**recomputed**: every step processes all tokens so far from an empty cache; its K/V are collected, never carried on.
Step 0 is the same work on both paths. Both keep one row of logits (`logits_to_keep=1`, as `generate` does).

Conventions. Batch size is 1. Tokens are `[pos]`, positions absolute. Values recorded at a site are those that the rest
of the model sees, after interventions, for the rows of the newest tokens (`rows="new"`; the prompt at step 0, then one
row a step), for the last row alone (`rows="last"`), or for every row that the pass processed (`rows="all"`). The KV
cache is a value (`KVState`) that goes in and comes out. Hooks attach once, when a `PathRunner` is entered, and write
only into the step that this runner is doing, so several runners can take turns on one model; leaving the runner, or
dropping a half-read generator, removes them.

Controls: every pass runs the cache guards (`guards.check_cache`); a non-finite logit stops the run with
`NonFiniteError`, which names the first layer and site that is not finite.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Any, get_args

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv import guards
from mechkv.cache import KVState, StateCache, blank_layers
from mechkv.errors import InputError
from mechkv.guards import GuardLog
from mechkv.hooks import Hooks, Pass
from mechkv.nonfinite import locate_non_finite
from mechkv.policies import Forced, Noted, TokenPolicy
from mechkv.step import At, Intervention, Path, RowsKept, Step

__all__ = ["At", "Intervention", "Path", "PathRunner", "RowsKept", "Step", "decode", "lockstep"]


class PathRunner:
    """One path of one model with its hooks attached; use as a context manager, then call `step`."""

    def __init__(
        self,
        model: TransformerBridge,
        path: Path,
        *,
        sites: Sequence[str] = (),
        rows: RowsKept = "new",
        interventions: Sequence[Intervention] = (),
        log: GuardLog | None = None,
    ) -> None:
        if path not in ("cached", "recomputed"):
            raise InputError("unknown path", got=repr(path), expected="'cached' or 'recomputed'", remedy="Name one.")
        if rows not in get_args(RowsKept):
            raise InputError("unknown rows", got=repr(rows), expected=get_args(RowsKept), remedy="Name one.")
        self.model, self.path, self.rows = model, path, rows
        self.log = GuardLog() if log is None else log
        self.interventions = tuple(interventions)
        config: Any = model.original_model.config
        self._blank = blank_layers(config)
        self._hooks = Hooks(model, path, sites, self.interventions)
        self._limits = guards.token_limits(model)
        self._carried: tuple[KVState, StateCache] | None = None

    def __enter__(self) -> "PathRunner":
        self._hooks.attach()
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.detach()

    def step(self, tokens: Int[Tensor, "pos"], state: KVState, index: int, n_new: int | None = None) -> Step:
        """One pass.

        Args:
            tokens: `[pos]`, all tokens so far, the new ones last.
            state: The KV state before the new tokens. The recomputed path takes only its `n_tokens` and `n_prompt`.
            index: Number of the step.
            n_new: New tokens; by default those beyond `state.n_tokens`.

        Raises:
            GuardError: The cache did not behave.
            NonFiniteError: A logit is NaN or infinite.
            InputError: Tokens of the wrong device, kind or range, or an intervention that returned the wrong shape.
        """
        n_new = len(tokens) - state.n_tokens if n_new is None else n_new
        step = self._step(tokens, self._start(tokens, state, n_new), index, len(tokens) - n_new)
        # A sum is finite only if all are, and takes a fraction of the time; it can also overflow.
        if not (torch.isfinite(step.logits.sum()) or torch.isfinite(step.logits).all()):
            raise locate_non_finite(self, step)
        return step

    def blocks(
        self, tokens: Int[Tensor, "pos"], state: KVState, index: int, n_new: int | None = None
    ) -> dict[str, tuple[Tensor, ...]]:
        """`step(...).activations` of a pass that ends with the last block: the model's head, a fifth of a small model,
        is left out. Guards and errors are those of `step`."""
        n_new = len(tokens) - state.n_tokens if n_new is None else n_new
        with self._hooks.end_with_blocks():
            values, last, *_ = self._pass(tokens, self._start(tokens, state, n_new), index, len(tokens) - n_new)
        # The whole pass says where it stopped being finite.
        return values if torch.isfinite(last).all() else dict(self.step(tokens, state, index, n_new).activations)

    def unchecked(self, step: Step) -> Step:
        """The same pass again, whether its logits are finite or not."""
        return self._step(step.tokens, step.kv_before, step.index, len(step.tokens) - step.n_new)

    def _start(self, tokens: Tensor, state: KVState, n_new: int) -> KVState:
        """The state that a pass begins with, once it is known that it can."""
        self._limits.check(tokens, n_new)
        guards.check_no_autocast(tokens.device, self.log)
        if self.path == "recomputed":
            return KVState.empty(state.n_prompt)
        if state.n_tokens != len(tokens) - n_new:
            raise InputError(
                "the KV state does not belong to these tokens",
                got=f"a state of {state.n_tokens} tokens",
                expected=f"{len(tokens) - n_new} tokens before the {n_new} new ones",
                remedy="Pass the state of the step before.",
            )
        return state

    def _step(self, tokens: Tensor, start_state: KVState, index: int, n_before: int) -> Step:
        activations, logits, after, n_kept = self._pass(tokens, start_state, index, n_before)
        return Step(
            index=index,
            path=self.path,
            tokens=tokens,
            positions=range(len(tokens) - n_kept, len(tokens)),
            logits=logits,
            activations=activations,
            kv_before=start_state,
            kv=after,
            n_new=len(tokens) - n_before,
        )

    def _pass(
        self, tokens: Tensor, start_state: KVState, index: int, n_before: int
    ) -> tuple[dict[str, tuple[Tensor, ...]], Tensor, KVState, int]:
        """Activations, the last row of what the model gives, the state after the pass, rows kept."""
        now = Pass(index, start_state.n_tokens, n_before, len(tokens), self.rows)
        cache, self._carried = self._cache_of(start_state), None
        with torch.inference_mode(False), torch.no_grad():
            self._hooks.now = now
            try:
                fed = tokens[start_state.n_tokens :]
                output = self.model(fed[None], past_key_values=cache, logits_to_keep=1)[0, -1].clone()
            finally:
                self._hooks.now = None
            after = cache.state(len(tokens))
            self._carried = (after, cache) if self.path == "cached" else None
            guards.check_cache(start_state, after, cache.visible, now.widths, self.log, edited=now.edited)
            return self._hooks.collect(now), output, after, now.n_kept

    def _cache_of(self, state: KVState) -> StateCache:
        """The cache that gave this state, when it is that of the last pass; else a new one."""
        if self._carried is not None and self._carried[0] is state:
            cache = self._carried[1]
            cache.visible.clear()
            return cache
        return StateCache(self._blank, state, self._hooks.edit_cache if self._hooks.edits_cache else None)


def decode(
    model: TransformerBridge,
    prompt: Int[Tensor, "pos"],
    *,
    path: Path,
    policy: TokenPolicy,
    n_steps: int,
    sites: Sequence[str] = (),
    rows: RowsKept = "new",
    interventions: Sequence[Intervention] = (),
    log: GuardLog | None = None,
    state: KVState | None = None,
    first_step: int = 0,
) -> Generator[Step, Step | None, None]:
    """The decode loop: step 0 on the prompt, then at most `n_steps` further steps with the tokens that `policy` gives.

    A run that was interrupted goes on with `first_step`, the `state` before that step, and all tokens of that step as
    `prompt`; steps `first_step` to `n_steps` follow.

    Args:
        model: The bridge.
        prompt: `[pos]`, on the device of the model's embedding.
        path: Which path to walk.
        policy: Chooses the tokens of every further step from the logits of the step before.
        n_steps: Steps after step 0.
        sites: Sites or TransformerLens hook names to record.
        rows: `new`: rows of the newest tokens; `last`: the last row; `all`: every row the pass processed.
        interventions: Applied during every pass.
        log: Counts the guards that ran.
        state: The KV state before the first step done; by default none (the recomputed path takes its counts only).
        first_step: Number of the first step done.

    Yields:
        `Step`s in order. Nothing is kept: a consumer that drops a step frees it. One that did a step again, patched,
        may send that one back: the run goes on from it.
    """
    log = GuardLog() if log is None else log
    if n_steps < 0:
        raise InputError("too few steps", got=n_steps, expected="0 or more", remedy="Step 0 alone is n_steps=0.")
    if not 0 <= first_step <= n_steps:
        raise InputError("first_step", got=first_step, expected=f"0 to n_steps={n_steps}", remedy="Steps count from 0.")
    guards.check_model(model, None, log)
    tokens, state = prompt, KVState.empty(n_prompt=len(prompt)) if state is None else state
    n_new = len(tokens) - state.n_tokens
    with PathRunner(model, path, sites=sites, rows=rows, interventions=interventions, log=log) as runner:
        for index in range(first_step, n_steps + 1):
            step = runner.step(tokens, state, index, n_new)
            given = yield step
            step = step if given is None else _the_same_step(step, given)
            if index == n_steps:
                return
            new = policy.next_tokens(step.logits, len(tokens))
            if not new:
                return
            state, n_new = step.kv, len(new)
            if path == "recomputed":  # only the counts are needed, and K and V of a whole text are large
                state = KVState((), (), state.n_tokens, state.n_prompt)
            tokens = torch.cat([tokens, tokens.new_tensor(new)])
            del step, given


def _the_same_step(ours: Step, given: Step) -> Step:
    """`given`, if it is `ours` done again."""
    if (given.path, given.index) != (ours.path, ours.index) or not torch.equal(given.tokens, ours.tokens):
        raise InputError(
            "the step sent back is another one",
            got=f"step {given.index} of the {given.path} path, {len(given.tokens)} tokens",
            expected=f"step {ours.index} of the {ours.path} path, done again on the same {len(ours.tokens)} tokens",
            remedy="Send a step made from the one that was yielded.",
        )
    return given


def lockstep(
    model: TransformerBridge,
    prompt: Int[Tensor, "pos"],
    *,
    policy: TokenPolicy,
    n_steps: int,
    sites: Sequence[str] = (),
    rows: RowsKept = "new",
    log: GuardLog | None = None,
    readers: Sequence[Intervention] = (),
) -> Iterator[tuple[Step, Step]]:
    """Both paths, teacher-forced on the tokens that `policy` chooses from the cached path's logits.

    Step 0 is the null control: any difference there is a `GuardError`. `readers` are asked on the recomputed path; they
    look at values and return None.

    Yields:
        (cached step, recomputed step), of the same tokens.
    """
    log = GuardLog() if log is None else log
    chosen: list[int] = prompt.tolist()
    cached = decode(
        model, prompt, path="cached", policy=Noted(policy, chosen), n_steps=n_steps, sites=sites, rows=rows, log=log
    )
    recomputed = decode(
        model,
        prompt,
        path="recomputed",
        policy=Forced(chosen, chunk=None),
        n_steps=n_steps,
        sites=sites,
        rows=rows,
        interventions=readers,
        log=log,
    )
    try:
        for ours in cached:
            theirs = next(recomputed)
            if ours.index == 0:
                guards.check_null(ours, theirs, log)
            yield ours, theirs
            del ours, theirs  # before the next step is made: each holds a KV state
    finally:
        cached.close()
        recomputed.close()
