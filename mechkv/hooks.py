"""What do hooks do during one pass? Keep the rows wanted, note how many keys attention has, ask for other values.

Conventions. Hooks attach once a run, at the hook points of TransformerLens, and write only into the pass in progress
(`Hooks.now`), so that several runs can take turns on one model. Values have a batch axis of one inside hooks and none
in what `collect` gives.

Cost. Some hundred hooks fire in every pass, between weights that leave nothing of them in the processor's caches: each
is one function deep and does one operation, and what it needs is worked out before the run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformer_lens.conversion_utils.conversion_steps import AttentionAutoConversion
from transformer_lens.hook_points import LensHandle
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.exceptions import StopAtLayerException

from mechkv.cache import Rows
from mechkv.errors import InputError
from mechkv.sites import AXES, CACHE_SITES, Tap, resolve
from mechkv.step import At, Intervention, Path, RowsKept

Place = tuple[str, int | None]
"""Site or hook name, and layer."""

Hook = Callable[[object, object, Tensor], Tensor | None]
"""As torch calls it: module, its input, its output."""


class Pass:
    """The pass in progress: what hooks write to."""

    def __init__(self, index: int, n_fed_from: int, n_before: int, n_tokens: int, rows: RowsKept) -> None:
        self.index, self.n_before, self.n_tokens, self.n_fed_from = index, n_before, n_tokens, n_fed_from
        self.n_fed = n_tokens - n_fed_from
        self.n_kept = {"new": n_tokens - n_before, "last": 1, "all": self.n_fed}[rows]
        self.kept: dict[Place, Tensor] = {}
        self.last: Tensor | None = None
        """The value read last; the axis it was read along, the writes to it by then, and the rows kept of it."""
        self.last_axis, self.last_writes = 0, -1
        self.last_rows: Tensor
        self.widths: dict[int, int] = {}
        """Layer -> keys that attention has."""
        self.edited = False
        """An intervention changed the cache."""


class Hooks:
    """Those of one run on one model."""

    def __init__(
        self, model: TransformerBridge, path: Path, sites: Sequence[str], interventions: Sequence[Intervention]
    ) -> None:
        asked = [site for one in interventions for site in one.sites]
        if "logits" in asked:
            raise InputError(
                "logits cannot be patched", got="logits", expected="a site inside the model", remedy="Use 'resid_post'."
            )
        points = model.hook_dict
        self._path, self._interventions = path, interventions
        self._read = resolve(model, sites, hooks=points)
        self._write = resolve(model, asked, hooks=points)
        self._widths = resolve(model, ["pattern"], hooks=points)
        self._end = resolve(model, ["resid_post"], [model.cfg.n_layers - 1], hooks=points)[0].hook_point
        self._order: dict[str, list[Place]] = {}
        for tap in self._read:
            self._order.setdefault(tap.key, []).append((tap.key, tap.layer))
        self.edits_cache = any(site in CACHE_SITES for site in asked)
        self.now: Pass | None = None
        self._handles: list[tuple[Tap, LensHandle]] = []

    def attach(self) -> None:
        """Add them to the model; interventions come first, so that what is read is what the rest of the model sees."""
        for taps, hook in ((self._write, self._patcher), (self._read, self._reader), (self._widths, self._ruler)):
            for tap in taps:
                self._handles.append((tap, _attach(tap, hook(tap))))

    def detach(self) -> None:
        """Remove them, and nothing of anybody else's."""
        for tap, handle in self._handles:
            handle.hook.remove()
            if handle in tap.hook_point.fwd_hooks:
                tap.hook_point.fwd_hooks.remove(handle)
        self._handles.clear()

    @contextmanager
    def end_with_blocks(self) -> Iterator[None]:
        """Passes end where the last block does, in the way of TransformerLens' `stop_at_layer`: the model then gives
        the residual stream in place of logits."""

        def end(module: object, given: object, value: Tensor) -> None:
            raise StopAtLayerException(value)

        handle = self._end.register_forward_hook(end)
        try:
            yield
        finally:
            handle.remove()

    def collect(self, now: Pass) -> dict[str, tuple[Tensor, ...]]:
        """What was kept of a pass that is over: site or hook name -> a value for each layer, without the batch axis.

        Raises:
            InputError: A hook did not fire.
        """
        if len(now.kept) < len(self._read):
            silent = next(tap for tap in self._read if (tap.key, tap.layer) not in now.kept)
            raise InputError(
                f"the hook for {silent.key!r} did not fire",
                got=f"{silent.hook_name} silent in a whole forward pass",
                expected="a value in every pass",
                remedy="This family's attention does not fire it, or a set_use_*(True) setter comes first; for K "
                "after rotation use 'cache_k', which works in every family.",
            )
        return {key: tuple([now.kept[place] for place in places]) for key, places in self._order.items()}

    def edit_cache(self, layer: int, keys: Rows, values: Rows, first: int) -> tuple[Rows, Rows]:
        """Ask interventions for other K and V (`cache.KVEdit`)."""
        assert self.now is not None
        positions = range(first, first + keys.shape[1])
        new_keys = self._ask(keys, "cache_k", layer, positions, self.now)
        new_values = self._ask(values, "cache_v", layer, positions, self.now)
        self.now.edited |= new_keys is not None or new_values is not None
        return keys if new_keys is None else new_keys, values if new_values is None else new_values

    def _reader(self, tap: Tap) -> Hook:
        """Keeps a copy of the rows wanted."""
        place = tap.key, tap.layer
        axis = tap.pos_axis + 1 if tap.pos_axis >= 0 else tap.pos_axis  # with the batch axis

        def read(module: object, given: object, value: Tensor) -> None:
            now = self.now
            if now is None:
                return
            if value.size(axis) != now.n_fed:
                raise _not_a_row_a_token(tap, value, now.n_fed)
            try:
                writes = value._version
            except RuntimeError:  # nothing counts the writes to an inference tensor
                writes = -1
            if value is now.last and axis == now.last_axis and writes == now.last_writes != -1:
                rows = now.last_rows  # a block's input is the output of the block before
            elif now.n_kept == now.n_fed:
                rows = torch.squeeze_copy(value, 0)
            elif value.is_contiguous():  # else all of it would be copied first
                rows = value.squeeze(0).narrow_copy(tap.pos_axis, now.n_fed - now.n_kept, now.n_kept)
            else:
                rows = value.squeeze(0).narrow(tap.pos_axis, now.n_fed - now.n_kept, now.n_kept).clone()
            now.kept[place] = now.last_rows = rows
            now.last, now.last_axis, now.last_writes = value, axis, writes

        return read

    def _ruler(self, tap: Tap) -> Hook:
        """Notes how many keys attention has."""
        layer = tap.layer
        assert layer is not None

        def measure(module: object, given: object, value: Tensor) -> None:
            now = self.now
            if now is not None:
                now.widths[layer] = value.shape[-1]

        return measure

    def _patcher(self, tap: Tap) -> Hook:
        """Asks the interventions for another value."""

        def patch(module: object, given: object, value: Tensor) -> Tensor | None:
            now = self.now
            if now is None:
                return None
            positions = range(now.n_fed_from, now.n_tokens)
            new = self._ask(value[0], tap.key, tap.layer, positions, now)
            return None if new is None else new[None]

        return patch

    def _ask(self, value: Tensor, site: str, layer: int | None, positions: range, now: Pass) -> Tensor | None:
        at = At(self._path, now.index, site, layer, positions, now.n_before)
        current: Tensor | None = None
        for intervention in self._interventions:
            if site not in intervention.sites:
                continue
            given = value if current is None else current
            version = None if given.is_inference() else given._version
            new = intervention(given, at)
            if version is not None and given._version != version:
                raise InputError(
                    f"an intervention changed {site} in place",
                    got=type(intervention).__name__,
                    expected="a new tensor",
                    remedy="Clone the value before writing to it: source runs must stay as they were.",
                )
            if new is None:
                continue
            if (new.shape, new.dtype, new.device) != (value.shape, value.dtype, value.device):
                raise InputError(
                    f"an intervention returned another kind of tensor for {site}, layer {layer}",
                    got=f"{list(new.shape)} {new.dtype} on {new.device}",
                    expected=f"{list(value.shape)} {value.dtype} on {value.device}",
                    remedy="Return the same shape, dtype and device; nothing is cast for you.",
                )
            current = new
        return current


def _attach(tap: Tap, ours: Hook) -> LensHandle:
    """As `HookPoint.add_hook` does and in the same list, without a wrapper where there is nothing to convert.

    `AttentionAutoConversion` turns values of four axes, and keeps a note of every value that it is shown: it is not
    shown those that are known to have three.
    """
    point: Any = tap.hook_point
    conversion = point.hook_conversion
    idle = isinstance(conversion, AttentionAutoConversion) and AXES.get(tap.key) == "pos d_model"
    if conversion is not None and not idle:
        return point.add_hook(lambda value, *, hook: ours(hook, (), value))
    handle = LensHandle(point.register_forward_hook(ours), user_hook=ours)
    point.fwd_hooks.append(handle)
    return handle


def _not_a_row_a_token(tap: Tap, value: Tensor, n_fed: int) -> InputError:
    return InputError(
        f"{tap.key!r} does not hold one row for every token",
        got=f"{list(value.shape)} where {n_fed} tokens were processed",
        expected=f"{n_fed} rows along axis {range(value.ndim - 1)[tap.pos_axis] + 1}",
        remedy="After the last block the model keeps one row: use 'logits', or a hook of ln_final.",
    )
