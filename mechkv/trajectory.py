"""Does a patch put the cached path back on the recomputed path's trajectory, and does it stay there?

Conditions, all on the cached path with the recomputed path (on the same tokens) as the source:

    none             the cached path as it is
    residual-once    the whole residual stream (`resid_post` of every layer, newest row) at one step
    residual-every   the same at every step from that one on
    kv-once          all old K and V rows of every layer at one step
    kv-every         the same at every step from that one on
    both-every       residual and K/V at every step from that one on

**Teacher-forced** (`teacher_forced`): all conditions process the same tokens, so drift can be attributed. At each step
the state that a condition inherits is also run without any patch: `probe` is that drift. It is what tells a repaired
trajectory from a repaired step, because a residual patch restores the logits of its own step by construction.

**Free-running** (`free_running`): each condition feeds itself with its own greedy tokens; it is compared with the
recomputed path that feeds itself. The patch is at step d, at which the unpatched cached path would choose a different
token for the first time, or from d on. Reported: the first divergence index of each condition (None: none in the
horizon, right-censored), and whether it rejoins: the last `TAIL` tokens are again those of the recomputed path at the
same positions. Prompts that never diverge have nothing to recover and are counted apart.

Controls. Patched steps are proven where the unpatched step is known (`interventions.check_landed`); with residual or
both patched the logits of that step must be bitwise those of the recomputed path on the same tokens (guard
`logits_by_construction`). By induction `residual-every` never leaves the recomputed trajectory from d on: a check.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv.cache import KVState
from mechkv.causal_run import WALKED, CausalResult, Frames, Walks, run_prompts, walk
from mechkv.configs import check_kinds, chosen, require
from mechkv.errors import GuardError
from mechkv.guards import GuardLog, same_bits
from mechkv.interventions import Patch
from mechkv.patch_bench import DISTANCES, PROVEN, PatchBench, distances
from mechkv.paths import PathRunner, Step, decode
from mechkv.policies import Greedy, Noted
from mechkv.sites import CACHE_SITES
from mechkv.sources import KVReader, StepSource
from mechkv.stats import cluster_bootstrap

CONDITIONS: tuple[str, ...] = ("none", "residual-once", "residual-every", "kv-once", "kv-every", "both-every")
TAIL = 4
"""Tokens at the end that must agree for a trajectory to have rejoined."""


@dataclass(frozen=True)
class TrajectoryConfig:
    """How far, and from which step on.

    Attributes:
        n_steps: Decode steps after the prompt.
        at: Teacher-forced: the step of the first patch (free-running: the step of the first divergence instead).
        conditions: Among `CONDITIONS`; `none` is always run.
    """

    n_steps: int = 12
    at: int = 4
    conditions: tuple[str, ...] = CONDITIONS

    def __post_init__(self) -> None:
        check_kinds(self)
        require(1 <= self.at <= self.n_steps, "step of the patch", got=self.at, expected=f"1..{self.n_steps}")
        require(set(self.conditions) <= set(CONDITIONS), "conditions", got=self.conditions, expected=CONDITIONS)

    @property
    def patched(self) -> tuple[str, ...]:
        """The conditions that patch."""
        return tuple(name for name in self.conditions if name != "none")


@dataclass(frozen=True)
class TeacherForced(CausalResult):
    """Drift of every condition on the same tokens.

    Attributes:
        frame: One row per prompt, step, condition and view (`patched`: the step as it was run; `probe`: the same
            inherited state without a patch): distances of the logits from the recomputed path's.
    """

    KIND: ClassVar[str] = "teacher_forced_trajectories"
    CONFIG: ClassVar[type] = TrajectoryConfig

    def summary(self, metric: str = "rel_l2", seed: int = 0) -> pd.DataFrame:
        """Mean distance per condition and view over the steps after the first patched one, with a 95 % interval over
        prompts, beside the share of steps with the bits of the recomputed path."""
        part, keys = self.frame[self.frame["step"] > self.config.at], ["condition", "view"]
        same = part.groupby(keys)["equals_recomputed"].mean().reset_index()
        return cluster_bootstrap(part, metric, by=keys, support=(0, float("inf")), seed=seed).merge(same, on=keys)

    def plot(self) -> dict[str, Any]:
        """The figures of this result by name."""
        from mechkv import plots_patching

        return plots_patching.trajectory_figures(self)


@dataclass(frozen=True)
class FreeRunning(CausalResult):
    """Tokens of every condition when it feeds itself.

    Attributes:
        frame: One row per prompt and condition: the step patched (`at`, the first divergence of the unpatched path; -1:
            it never diverges), the condition's own first divergence index (-1: none), the number of tokens, whether it
            rejoins, and its tokens as text separated by blanks.
    """

    KIND: ClassVar[str] = "free_running_trajectories"
    CONFIG: ClassVar[type] = TrajectoryConfig

    def summary(self) -> pd.DataFrame:
        """Per condition, over the prompts whose unpatched path diverges: how many follow the recomputed path to the end
        of the horizon, how many diverge later and rejoin, and the median gain in first divergence index."""
        part = self.frame[self.frame["at"] >= 0]
        rows = []
        for condition, group in part.groupby("condition", sort=False):
            stays = group["divergence"] < 0
            rows.append(
                {
                    "condition": condition,
                    "n_diverging": len(group),
                    "n_prompts": self.frame["prompt"].nunique(),
                    "follows_to_end": int(stays.sum()),
                    "rejoins": int((~stays & group["rejoins"]).sum()),
                    "median_gain": float((group["divergence"].where(~stays, group["n_tokens"]) - group["at"]).median()),
                }
            )
        columns = ["condition", "n_diverging", "n_prompts", "follows_to_end", "rejoins", "median_gain"]
        return pd.DataFrame(rows, columns=columns)


def teacher_forced(
    model: TransformerBridge,
    prompts: Sequence[str | Tensor],
    config: TrajectoryConfig | None = None,
    *,
    folder: Path | str | None = None,
    walks: Walks | None = None,
    progress: bool | None = None,
) -> TeacherForced:
    """All conditions on the cached path's greedy tokens; arguments as for `causal_factorial`."""
    config = chosen(config, TrajectoryConfig)

    def measure(number: int, prompt: Tensor, log: GuardLog) -> Frames:
        states: dict[str, KVState] = {}
        rows: list[dict[str, Any]] = []
        with PatchBench(model, "cached", log=log) as bench:
            for pair in walk(walks, model, prompt, config.n_steps, log):
                if pair.index < config.at:
                    continue
                base, source = pair.cached, pair.source("recomputed")
                shown: dict[tuple[str, str], Step] = {("none", "patched"): base, ("none", "probe"): base}
                for name in config.patched:
                    patches = _patches(name, pair.index, config.at, source)
                    state = states.get(name, base.kv_before)
                    plain = base if state is base.kv_before else bench.plain(base.tokens, state, pair.index)
                    step = bench.patched(plain, *patches) if patches else plain
                    _check_by_construction(name, patches, step, pair.recomputed, log)
                    states[name] = step.kv
                    shown |= {(name, "patched"): step, (name, "probe"): plain}
                rows += _drift_rows(pair.index, shown, pair.recomputed)
        return {"frame": pd.DataFrame(rows)}

    return run_prompts(
        TeacherForced, model, prompts, config, measure, n_steps=config.n_steps, folder=folder, progress=progress
    )


def _patches(name: str, index: int, at: int, source: StepSource) -> tuple[Patch, ...]:
    what, _, when = name.partition("-")
    if name == "none" or index < at or (when == "once" and index > at):
        return ()
    residual = Patch(source, "cached", ("resid_post",), positions="current")
    kv = Patch(source, "cached", CACHE_SITES, positions="past")
    return {"residual": (residual,), "kv": (kv,), "both": (kv, residual)}[what]


def _check_by_construction(name: str, patches: tuple[Patch, ...], step: Step, recomputed: Step, log: GuardLog) -> None:
    if not patches or name.startswith("kv"):
        return
    if not same_bits(step.logits, recomputed.logits):
        raise GuardError(
            f"the residual stream of the recomputed path does not give its logits ({name}, step {step.index})",
            got="other bits",
            expected="the same bits: both paths unembed one row",
            remedy="The unembedding differs between the paths: check logits_to_keep.",
        )
    log["logits_by_construction"] += 1


def _drift_rows(index: int, shown: dict[tuple[str, str], Step], recomputed: Step) -> list[dict[str, Any]]:
    table = distances([step.logits for step in shown.values()], recomputed.logits)
    return [
        {"step": index, "condition": name, "view": view}
        | {metric: float(table[metric][i]) for metric in DISTANCES}
        | {"flip": bool(table["flip"][i]), "equals_recomputed": bool(table["bitwise_equal"][i])}
        for i, (name, view) in enumerate(shown)
    ]


# ----------------------------------------------------------------------------------------------------- free-running


def free_running(
    model: TransformerBridge,
    prompts: Sequence[str | Tensor],
    config: TrajectoryConfig | None = None,
    *,
    folder: Path | str | None = None,
    progress: bool | None = None,
) -> FreeRunning:
    """Every condition with its own greedy tokens; arguments as for `causal_factorial`."""
    config = chosen(config, TrajectoryConfig)

    def measure(number: int, prompt: Tensor, log: GuardLog) -> Frames:
        with ExitStack() as stack:
            free = _FreeRun(model, prompt, config.n_steps, log, stack)
            clean = free.recomputed_tokens()
            plain = free.cached_tokens((), -1)
            at = _divergence(plain, clean)
            found = {"none": plain}
            if at >= 0:
                found |= {name: free.cached_tokens((name,), at) for name in config.patched}
        rows = [{"condition": name, "at": at} | _compared(tokens, clean) for name, tokens in found.items()]
        return {"frame": pd.DataFrame(rows)}

    return run_prompts(
        FreeRunning, model, prompts, config, measure, n_steps=config.n_steps, folder=folder, progress=progress
    )


class _FreeRun:
    """Greedy runs of one prompt; full passes over the same tokens are done once."""

    def __init__(self, model: TransformerBridge, prompt: Tensor, n_steps: int, log: GuardLog, stack: ExitStack) -> None:
        self._model, self.prompt, self.n_steps, self.log, self._reader = model, prompt, n_steps, log, KVReader()
        self._full = stack.enter_context(
            PathRunner(model, "recomputed", sites=WALKED, interventions=(self._reader,), log=log)
        )
        self._bench = stack.enter_context(PatchBench(model, "cached", log=log))
        self._done: dict[tuple[int, ...], StepSource] = {}

    def recomputed(self, tokens: Tensor, index: int) -> StepSource:
        """The recomputed path's step on these tokens."""
        key = tuple(tokens.tolist())
        if key not in self._done:
            n_new = len(self.prompt) if index == 0 else 1
            state = KVState((), (), len(tokens) - n_new, len(self.prompt))
            step = self._full.step(tokens, state, index, n_new)
            self._done[key] = StepSource(step, dict(self._reader.rows))
        return self._done[key]

    def recomputed_tokens(self) -> list[int]:
        """What the recomputed path generates when it feeds itself."""
        policy, tokens = Greedy(), self.prompt.tolist()
        for index in range(self.n_steps + 1):
            fed = self.prompt.new_tensor(tokens)
            tokens += policy.next_tokens(self.recomputed(fed, index).step.logits, len(tokens))
        return tokens[len(self.prompt) :]

    def cached_tokens(self, condition: tuple[str, ...], at: int) -> list[int]:
        """What the cached path generates under a condition whose first patch is at step `at`."""
        policy = Noted(Greedy(), written := self.prompt.tolist())
        run = decode(
            self._model, self.prompt, path="cached", policy=policy, n_steps=self.n_steps, sites=PROVEN, log=self.log
        )
        step = next(run)
        while step.index < self.n_steps:
            step = run.send(self._patched(step, condition, at))
        policy.next_tokens(self._patched(step, condition, at).logits, len(step.tokens))
        return written[len(self.prompt) :]

    def _patched(self, step: Step, condition: tuple[str, ...], at: int) -> Step:
        """The step with what the condition patches at it."""
        for name in condition:
            if step.index and step.index >= at and (step.index == at or name.endswith("every")):
                source = self.recomputed(step.tokens, step.index)
                patches = _patches(name, step.index, at, source)
                step = self._bench.patched(step, *patches)
                _check_by_construction(name, patches, step, source.step, self.log)
        return step


def _divergence(tokens: list[int], clean: list[int]) -> int:
    """The first index at which the tokens differ; -1: nowhere."""
    return next((i for i, (a, b) in enumerate(zip(tokens, clean, strict=True)) if a != b), -1)


def _compared(tokens: list[int], clean: list[int]) -> dict[str, Any]:
    return {
        "divergence": _divergence(tokens, clean),
        "n_tokens": len(tokens),
        "rejoins": tokens != clean and tokens[-TAIL:] == clean[-TAIL:],
        "tokens": " ".join(map(str, tokens)),
    }
