"""What is easily got wrong at a prompt or in a notebook is told in mechkv's own words, and breaks nothing else."""

import subprocess
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch

import mechkv
from mechkv import drift, models, storage
from mechkv.errors import InputError, ModelError, StorageError
from mechkv.factorial import FactorialConfig, causal_factorial
from mechkv.patching import SweepConfig
from mechkv.prompts import chat_prompt, format_prompt, sample, word_problems
from mechkv.runs import RunFolder
from mechkv.sites import resolve
from tests.tiny import tiny_bridge, tiny_hf, tiny_tokenizer, tokens


@pytest.fixture(autouse=True)
def unchecked():
    """As outside pytest, where nobody checks annotations."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def model():
    return tiny_bridge()


def test_no_module_hides_a_public_name() -> None:
    """Importing `mechkv.x` binds it in the package: a function of the same name would be gone from then on."""
    modules = {path.stem for path in Path(mechkv.__file__).parent.glob("*.py")}
    assert not modules & set(mechkv._WHERE)
    assert set(mechkv._WHERE.values()) <= modules  # the twin: the names compared are names of modules
    code = "import mechkv, mechkv.twin_drift; assert callable(mechkv.twin_study)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_wrapping_a_bridge_again_is_refused_and_leaves_it_alone() -> None:
    model = tiny_bridge()
    for wrong in (model, None, "smollm2-135m"):
        with pytest.raises(InputError, match=r"not a Hugging Face model.*load_model"):
            mechkv.from_hf(wrong)
    assert len(mechkv.drift_profile(model, [tokens(4)], drift.DriftConfig(n_steps=1)).prompts) == 1


def test_a_bridge_whose_model_was_wrapped_later_says_so() -> None:
    """The twin: wrapping again does break the older bridge, and no number comes out of it."""
    hf = tiny_hf()
    old, new = mechkv.from_hf(hf), mechkv.from_hf(hf)
    config = drift.DriftConfig(n_steps=1)
    assert len(mechkv.drift_profile(new, [tokens(4)], config).prompts) == 1
    with pytest.raises(mechkv.CacheError, match="wrapped again later: then use the newer bridge"):
        mechkv.drift_profile(old, [tokens(4)], config)


def test_paths_that_are_no_model_are_named(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"config.json, a file; expected a folder"):
        mechkv.load_model(tmp_path / "config.json")
    for name in (str(tmp_path / "nothing"), "./nothing"):
        with pytest.raises(ModelError, match="which does not exist"):
            mechkv.load_model(name)
    with pytest.raises(InputError, match=r"got LlamaForCausalLM.*from_hf"):
        mechkv.load_model(tiny_hf())
    with pytest.raises(InputError, match=r"device cannot be used: got 'None'"):
        models.to_device(None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": None}, "prompts: got NoneType"),
        ({"prompts": 3}, "prompts: got int"),
        ({"config": {"n_steps": 3}}, "config: got dict"),
        ({"control": True}, "not a TransformerBridge: got bool"),
        ({"continuations": [5]}, r"1 continuations \(int\)"),
        ({"continuations": [torch.tensor([5, 6])]}, r"1 continuations \(Tensor\)"),
    ],
)
def test_arguments_of_another_kind_are_refused(model, arguments, words) -> None:
    given = {"prompts": [tokens(4)], "config": drift.DriftConfig(n_steps=1)} | arguments
    with pytest.raises(InputError, match=words):
        mechkv.drift_profile(model, **given)


@pytest.mark.parametrize("wrong", [2.5, True, "3"])
def test_numbers_that_are_not_whole_are_refused(wrong) -> None:
    with pytest.raises(InputError, match=r"n_steps: got .*whole number"):
        drift.DriftConfig(n_steps=wrong)
    with pytest.raises(InputError, match="number of problems"):
        sample(word_problems(), wrong)
    assert drift.DriftConfig(n_steps=2).n_steps == len(sample(word_problems(), 2))


def test_sites_of_another_kind_are_refused(model) -> None:
    with pytest.raises(InputError, match=r"Write \('resid_post',\)"):
        drift.DriftConfig(sites="resid_post")
    with pytest.raises(InputError, match="not a site: got None"):
        resolve(model, [None])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "smollm2-135m"}, "not a TransformerBridge: got str"),
        ({"tokens": None}, "not tokens: got NoneType"),
        ({"n_prompt": 1.5}, "n_prompt=1.5"),
        ({"device": "gpu0"}, "device cannot be used: got 'gpu0'"),
    ],
)
def test_a_recording_that_cannot_be_made_is_refused(model, arguments, words) -> None:
    given = {"model": model, "tokens": tokens(4), "n_prompt": 2, "path": "cached"} | arguments
    with pytest.raises(InputError, match=words):
        mechkv.record(given.pop("model"), given.pop("tokens"), **given)


def test_a_bridge_puts_the_begin_of_text_first_where_the_tokenizer_would_not(model) -> None:
    config = drift.DriftConfig(n_steps=1)
    plain = tiny_tokenizer()("w7 w8")["input_ids"]
    as_text = mechkv.drift_profile(model, ["w7 w8"], config).prompts
    as_tokens = mechkv.drift_profile(model, [torch.tensor(plain)], config).prompts
    assert plain == [7, 8]
    assert as_text["tokens"][0][:3].tolist() == [98, *plain]
    assert as_tokens["tokens"][0][: as_tokens["n_prompt"][0]].tolist() == plain


def test_tokens_on_the_meta_device_are_refused(model) -> None:
    nothing = torch.empty(6, dtype=torch.int64, device="meta")
    calls = (
        lambda: mechkv.drift_profile(model, [nothing], drift.DriftConfig(n_steps=1)),
        lambda: mechkv.check(model, prompts=[nothing], dtypes=("float32",)),
        lambda: mechkv.check_paths(lambda dtype: model, len, len, nothing, n_prompt=2),
        lambda: mechkv.record(model, nothing, n_prompt=2, path="cached"),
        lambda: mechkv.compare(nothing.float(), nothing.float()),
    )
    for call in calls:
        with pytest.raises(InputError, match=r"got .*meta.*; expected .*\. (Make them|Use the CPU)"):
            call()


def test_what_is_no_question_is_refused(model) -> None:
    for call in (format_prompt, lambda question: chat_prompt(model.tokenizer, question)):
        for wrong in (None, 3, ["w7"]):
            with pytest.raises(InputError, match=rf"question: got a {type(wrong).__name__}; expected a text or a Prob"):
                call(wrong)
    with pytest.raises(InputError, match=r"shots.*got a str; expected problems"):
        format_prompt("w7", shots=["w8"])
    assert "w7" in format_prompt("w7", shots=word_problems()[:1])  # the twin


def test_lists_are_not_compared() -> None:
    with pytest.raises(InputError, match="not tensors: got list"):
        mechkv.compare([1.0], [1.0])


def test_a_folder_below_a_file_is_refused_in_our_words(tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    for call in (
        lambda: RunFolder(tmp_path / "file", {}),
        lambda: RunFolder(tmp_path / "file" / "run", {}),
        lambda: storage.write_json(tmp_path / "file" / "x.json", 1),
    ):
        with pytest.raises(StorageError, match="cannot be used"):
            call()
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mechkv.Strategy(temperature="x"), "temperature: got 'x'"),
        (lambda: mechkv.TokenDivergenceConfig(strategies=("x",)), "strategies"),
        (lambda: mechkv.TokenDivergenceConfig(strategies=mechkv.Strategy()), r"Write \(Strategy"),
        (lambda: mechkv.TokenDivergenceConfig(coupling="gumbell"), "expected one of 'uniform', 'gumbel'"),
        (lambda: mechkv.TokenDivergenceConfig(stop_at_eos="no"), "stop_at_eos"),
        (lambda: SweepConfig(at=0), "at: got 0"),
        (lambda: SweepConfig(doses=("x",)), "doses"),
        (lambda: SweepConfig(n_steps=0), "n_steps: got 0; expected 1 or more"),
        (lambda: FactorialConfig(n_steps=1.5), "n_steps: got 1.5; expected a whole number"),
    ],
)
def test_slips_in_settings_are_named_where_they_are_made(make, message) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_the_settings_of_another_analysis_are_refused(model) -> None:
    with pytest.raises(InputError, match="got dict; expected a FactorialConfig"):
        causal_factorial(model, [torch.tensor([1, 2, 3])], {"n_steps": 3})
    with pytest.raises(InputError, match="got FactorialConfig; expected a DriftConfig"):
        mechkv.drift_profile(model, [torch.tensor([1, 2, 3])], FactorialConfig())
