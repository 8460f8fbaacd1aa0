"""One module per question: `Config` (frozen) -> `run(config, pool, folder)` -> `Outcome`; `reproduce` runs them all."""
