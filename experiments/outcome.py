"""What every experiment module gives back, and what it is given.

A module has `NAME`, a frozen `Config` whose fields are its settings, `PRESETS` (preset name -> Config; `quick` and
`paper` at least) and `run(config, pool, folder) -> Outcome`. It keeps its own results below `folder` and resumes there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformer_lens.model_bridge import TransformerBridge

from mechkv.claims import Finding
from mechkv.errors import InputError
from mechkv.models import load_model
from mechkv.prompts import format_prompt, load_problems, sample, word_problems
from mechkv.report import Section


@dataclass(frozen=True)
class Outcome:
    """Findings for the claims table, sections for the report, settings and limits to print beside them."""

    findings: Sequence[Finding]
    sections: Sequence[Section]
    method: Sequence[tuple[str, str]] = ()
    limits: Sequence[str] = ()
    provenance: dict[str, Any] = field(default_factory=dict)


class ModelPool:
    """Models by (source, dtype), loaded once for all experiments of one run."""

    def __init__(self, device: str = "auto") -> None:
        self._device = device
        self._models: dict[tuple[str, str], TransformerBridge] = {}

    def get(self, source: str, dtype: str) -> TransformerBridge:
        """The model of that source in that dtype."""
        if (source, dtype) not in self._models:
            self._models[source, dtype] = load_model(source, dtype=dtype, device=self._device)
        return self._models[source, dtype]


def number(value: float) -> float | None:
    """A number of a finding: None where it is undefined; an infinite bound stays, so that the interval is shown."""
    return None if math.isnan(value) else float(value)


def problem_texts(n: int, file: Path | None, seed: int | None = None) -> list[str]:
    """The first `n` problems (or a seeded choice), ours or those of a GSM8K-format file, as prompts.

    Raises:
        InputError: There are fewer than `n`.
    """
    if n < 1:
        raise InputError("too few prompts", got=n, expected="at least 1", remedy="Ask for some.")
    problems = word_problems() if file is None else load_problems(file)
    return [format_prompt(problem) for problem in sample(problems, n, seed)]
