"""The main job on a tiny model: what it writes, what it says when killed and started again, and what it refuses."""

import json
from pathlib import Path

import pytest

from experiments import layer_drift
from experiments.reproduce import Reproduce, _command, main
from mechkv import drift
from mechkv.errors import InputError, StorageError
from tests.tiny import tiny_hf, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    place = tmp_path_factory.mktemp("model")
    tiny_hf("llama-gqa", max_position_embeddings=512).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return str(place)


@pytest.fixture
def settings(model, tmp_path, monkeypatch) -> Reproduce:
    monkeypatch.setitem(layer_drift.PRESETS, "quick", layer_drift.Config(n_prompts=2, n_steps=3))
    return Reproduce(model=model, only=("layer_drift",), out=tmp_path / "results", device="cpu")


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Figures take most of the time and are looked at in another test."""
    monkeypatch.setattr(drift.DriftProfile, "plot", lambda self: {})


def tables(folder: Path) -> dict[str, bytes]:
    """Everything that is a result and not about when it was made."""
    wanted = (".parquet", ".csv")
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.suffix in wanted}
    return found | {"claims.json": (folder / "claims.json").read_bytes()}


def test_it_writes_all_that_it_promises(settings):
    report = main(settings)
    folder = settings.out / "quick"
    assert report == folder / "report.html"
    page = report.read_text()
    assert "Drift by layer" in page
    assert 'src="http' not in page  # opens offline
    assert all(list((folder / "figures").glob(f"*.{kind}")) for kind in ("png", "pdf"))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {"versions", "machine", "kernels", "command", "models", "settings"} <= set(manifest)
    assert set(manifest["models"]["layer_drift"]) == {"float16", "float32"}
    claims = json.loads((folder / "claims.json").read_text())
    text = json.dumps(claims)
    assert all(f'"C{number}"' in text for number in range(1, 7))
    assert "not measured" in text


@pytest.mark.usefixtures("undrawn")
def test_killed_at_any_moment_it_ends_with_the_same_tables(settings, tmp_path, monkeypatch):
    main(settings)
    expected = tables(settings.out / "quick")
    real = drift.profile_prompt
    for survives in (0, 1, 3):  # of four pieces: two prompts in two dtypes
        out, calls = tmp_path / f"killed-{survives}", []

        def dies(*args, calls=calls, survives=survives, **options):
            calls.append(1)
            if len(calls) > survives:
                raise KeyboardInterrupt
            return real(*args, **options)

        again = Reproduce(model=settings.model, only=settings.only, out=out, device="cpu")
        monkeypatch.setattr(drift, "profile_prompt", dies)
        with pytest.raises(KeyboardInterrupt):
            main(again)
        assert not (out / "quick" / "report.html").exists()
        monkeypatch.setattr(drift, "profile_prompt", lambda *a, **o: calls.append(1) or real(*a, **o))  # noqa: B023
        main(again)
        assert len(calls) == 4 + 1, "finished pieces are not done again"
        assert tables(out / "quick") == expected


@pytest.mark.usefixtures("undrawn")
def test_a_folder_of_another_run_is_refused_and_left_alone(settings, monkeypatch):
    main(settings)
    before = tables(settings.out / "quick")
    monkeypatch.setitem(layer_drift.PRESETS, "quick", layer_drift.Config(n_prompts=2, n_steps=4))
    with pytest.raises(StorageError, match="another run"):
        main(settings)
    assert tables(settings.out / "quick") == before
    for wrong in (Reproduce(preset="huge"), Reproduce(only=("nothing",))):
        with pytest.raises(InputError):
            main(wrong)


def test_the_report_names_the_command_that_makes_it():
    assert _command(Reproduce()) == "python -m experiments.reproduce --preset quick"
    given = Reproduce(preset="paper", model="my model", only=("layer_drift", "check_study"))
    assert _command(given).endswith("--preset paper --model 'my model' --only layer_drift check_study")


@pytest.mark.parametrize(("dtype", "orders"), [("float16", 7.83), ("bfloat16", 9.63), ("float32", 0.0)])
def test_orders_foretold_by_unit_roundoffs(dtype, orders):
    assert layer_drift.predicted_orders(dtype) == pytest.approx(orders, abs=0.01)
