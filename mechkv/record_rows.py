"""What does a recorded run keep, how large is it, and where do the rows go as they come?

A `Row` is the last row of one hook in one step. Shapes and dtypes follow from the model's sizes for the sites whose
dtype is the model's. The others are asked of the model by one pass of one token, and so is the dtype of its KV cache,
once per model (OLMo-2 rotates, caches K and attends in float32 in a float16 model). `count_bytes` is exact, and
`Buffer` refuses what was not planned for.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechkv.cache import KVState
from mechkv.errors import InputError
from mechkv.guards import input_device
from mechkv.models import DTYPES, ModelInfo, info
from mechkv.paths import PathRunner, Step
from mechkv.sites import AXES, HOOKS, Tap, resolve

_MODEL_DTYPE_SITES = frozenset(HOOKS) - {"rot_q", "rot_k", "pattern"}
_KEY_AXIS = {"hook_pattern": 0.0, "hook_attn_scores": float("-inf")}
"""Hooks whose last axis is the key's position -> what stands where a step sees no key."""

_KV_WIDTHS: "weakref.WeakKeyDictionary[TransformerBridge, int]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Row:
    """What one hook gives for one step: where it stands in `Step.activations` and the shape without `pos`."""

    key: str
    index: int
    pos_axis: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    hidden_key: float | None
    """For an axis of key positions, what stands where no key is seen."""

    @property
    def name(self) -> str:
        """Name of its tensor in a file."""
        return f"{self.key}/{self.index}"


def plan_rows(model: TransformerBridge, names: Sequence[str], n_tokens: int) -> list[Row]:
    """The rows that sites or hook names stand for, in a run over `n_tokens` tokens."""
    taps, known = resolve(model, names), info(model)
    sizes = {"d_model": known.d_model, "n_heads": known.n_heads, "n_kv": known.n_kv, "d_head": known.d_head}
    asked = _ask_model(model, [tap for tap in taps if _site(tap) not in _MODEL_DTYPE_SITES])
    rows = []
    for tap in taps:
        site, hidden = _site(tap), _KEY_AXIS.get(tap.hook_name.rsplit(".", 1)[-1])
        index = tap.layer if tap.key in HOOKS and tap.layer is not None else 0
        if site in _MODEL_DTYPE_SITES:
            shape, dtype = tuple(sizes[axis] for axis in AXES[site].split() if axis != "pos"), DTYPES[known.dtype]
        else:
            value = asked[tap.key][index].select(tap.pos_axis, -1)
            shape = tuple(value.shape) if hidden is None else (*value.shape[:-1], n_tokens)
            dtype = value.dtype
        rows.append(Row(tap.key, index, tap.pos_axis, shape, dtype, hidden))
    return rows


def _site(tap: Tap) -> str:
    """The site that a hook point is, if it is one."""
    inner = tap.hook_name.removeprefix(f"blocks.{tap.layer}.")
    return next((site for site, hook in HOOKS.items() if hook == inner), "")


def _ask_model(model: TransformerBridge, taps: Sequence[Tap]) -> Mapping[str, tuple[Tensor, ...]]:
    if not taps:
        return {}
    with PathRunner(model, "cached", sites=list(dict.fromkeys(tap.key for tap in taps))) as runner:
        return runner.step(_one_token(model), KVState.empty(1), 0).activations


def count_bytes(model: TransformerBridge, rows: Sequence[Row], n_tokens: int, n_prompt: int, keep_states: bool) -> int:
    """Bytes of the logits, the rows of every step, and the final KV state or that of every step."""
    known, n_steps = info(model), n_tokens - n_prompt + 1
    total = n_steps * known.d_vocab * DTYPES[known.dtype].itemsize
    for row in rows:
        total += n_steps * torch.Size(row.shape).numel() * row.dtype.itemsize
    for length in range(n_prompt if keep_states else n_tokens, n_tokens + 1):
        held = sum(length if window is None else min(length, window - 1) for window in known.windows)
        total += held * known.n_kv * known.d_head * _kv_width(model)
    return total


def _kv_width(model: TransformerBridge) -> int:
    """Bytes of one number of K and one of V together."""
    if model not in _KV_WIDTHS:
        with PathRunner(model, "cached") as runner:
            state = runner.step(_one_token(model), KVState.empty(1), 0).kv
        _KV_WIDTHS[model] = state.keys[0].itemsize + state.values[0].itemsize
    return _KV_WIDTHS[model]


def _one_token(model: TransformerBridge) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=input_device(model))


class Buffer:
    """Room for steps `first` to `stop - 1`, filled as they come."""

    def __init__(
        self, known: ModelInfo, rows: Sequence[Row], keep_states: bool, first: int, stop: int, device: torch.device
    ) -> None:
        self.first, self.stop = first, stop
        self._keep_states, self._device = keep_states, device
        n_steps, dtype = stop - first, DTYPES[known.dtype]
        self._logits = torch.empty(n_steps, known.d_vocab, dtype=dtype, device=device)
        self._blocks: list[tuple[list[Row], Tensor]] = []
        for alike in _group(rows):
            room = torch.empty(n_steps, len(alike), *alike[0].shape, dtype=alike[0].dtype, device=device)
            hidden = alike[0].hidden_key
            self._blocks.append((alike, room if hidden is None else room.fill_(hidden)))
        self.states: dict[int, KVState] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> `[step, ...]`: the logits and every row."""
        rows = {row.name: room[:, i] for alike, room in self._blocks for i, row in enumerate(alike)}
        return {"logits/0": self._logits} | rows

    def put(self, step: Step) -> None:
        """Keep a step recorded with `rows="last"`."""
        at, newest = step.index - self.first, len(step.tokens)
        self._logits[at].copy_(step.logits)
        for alike, block in self._blocks:
            given, room, axis = step.activations[alike[0].key], block[at], alike[0].pos_axis
            if len(given) != len(alike):
                given = tuple([given[row.index] for row in alike])
            if alike[0].hidden_key is None:
                _put_together(alike, given, room.unsqueeze(axis + 1 if axis >= 0 else axis))
                continue
            for row, value, place in zip(alike, given, room, strict=True):  # windows see fewer keys than other layers
                place = place[..., newest - value.shape[-1] : newest].unsqueeze(axis)
                _check_planned([row], [value], place.shape)
                place.copy_(value)
        if self._keep_states:
            self.states[step.index] = own_state(step.kv, self._device)


def _group(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one key and one kind, which are kept in one block."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.key, row.pos_axis, row.shape, row.dtype, row.hidden_key), []).append(row)
    return list(groups.values())


def _put_together(rows: Sequence[Row], given: tuple[Tensor, ...], room: Tensor) -> None:
    """`given` into `room`, `[layer, ...]`, in one go for each device that layers are on."""
    _check_planned(rows, given, room.shape[1:])
    devices = {value.device for value in given}
    if devices == {room.device}:
        torch.stack(given, out=room)
        return
    for device in devices:
        layers = [layer for layer, value in enumerate(given) if value.device == device]
        room[layers] = torch.stack([given[layer] for layer in layers]).to(room.device)


def _check_planned(rows: Sequence[Row], given: Sequence[Tensor], shape: torch.Size) -> None:
    dtype = rows[0].dtype
    wrong = [i for i, value in enumerate(given) if value.shape != shape or value.dtype != dtype]
    if wrong:
        row, value = rows[wrong[0]], given[wrong[0]]
        raise InputError(
            f"{row.name} is not what was planned for",
            got=f"{list(value.shape)} {value.dtype}",
            expected=f"{list(shape)} {dtype}",
            remedy="This family departs from the shapes of mechkv.sites: record it by its full hook name.",
        )


def own_state(state: KVState, device: torch.device) -> KVState:
    """The state on `device`, in memory of its own (a window's rows are a view of more)."""
    keys, values = ([rows.to(device, copy=True).contiguous() for rows in part] for part in (state.keys, state.values))
    return KVState(tuple(keys), tuple(values), state.n_tokens, state.n_prompt)
