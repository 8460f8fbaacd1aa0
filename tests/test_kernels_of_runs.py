"""A run that was begun with some kernels is not continued with others: one table holds the bits of one kind."""

import re

import pytest
import torch

import mechkv
from mechkv import provenance
from mechkv.divergence import TokenDivergenceConfig
from mechkv.drift import DriftConfig
from mechkv.errors import StorageError
from mechkv.factorial import FactorialConfig
from mechkv.heads import HeadConfig
from mechkv.oracle import OracleConfig, oracle_study
from mechkv.runs import RunFolder, differences
from mechkv.storage import read_json, write_json
from mechkv.twin_drift import TwinConfig, twin_study
from mechkv.twins import permute_heads
from tests.tiny import tiny_bridge, tokens


@pytest.fixture(scope="module")
def model():
    return tiny_bridge()


PROMPTS = [tokens(4)]
RUNS = {
    "drift": lambda m, folder: mechkv.drift_profile(m, PROMPTS, DriftConfig(n_steps=1), folder=folder),
    "tokens": lambda m, folder: mechkv.token_divergence(m, PROMPTS, TokenDivergenceConfig(n_tokens=2), folder=folder),
    "factorial": lambda m, folder: mechkv.causal_factorial(m, PROMPTS, FactorialConfig(n_steps=1), folder=folder),
    "heads": lambda m, folder: mechkv.head_analysis(m, PROMPTS, HeadConfig(n_steps=1), folder=folder),
    "oracle": lambda m, folder: oracle_study(m, PROMPTS, OracleConfig(n_steps=1, floor_every=1), folder=folder),
    "twins": lambda m, folder: twin_study(
        m, {"reordered": permute_heads(m)}, PROMPTS, TwinConfig(n_steps=1), folder=folder
    ),
    "record": lambda m, folder: mechkv.record(m, tokens(4), n_prompt=3, path="cached", folder=folder),
}


@pytest.mark.parametrize("name", RUNS)
def test_another_number_of_threads_does_not_continue_it(name, model, tmp_path):
    RUNS[name](model, tmp_path / "run")
    RUNS[name](model, tmp_path / "run")  # the twin
    torch.set_num_threads(2)
    with pytest.raises(StorageError, match=r"another (run|value).*kernels\.threads"):
        RUNS[name](model, tmp_path / "run")


def test_what_decides_kernels_is_plain_and_holds_the_switches(model, tmp_path):
    found = provenance.what_decides_kernels(model)
    write_json(tmp_path / "x.json", found)
    assert read_json(tmp_path / "x.json") == found
    assert (found["devices"], found["threads"]) == (["cpu"], torch.get_num_threads())
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"cpu_capability", "deterministic_algorithms", "float32_matmul_precision"} <= set(found)
    torch.use_deterministic_algorithms(not found["deterministic_algorithms"])
    assert [*differences(found, provenance.what_decides_kernels(model))] == ["deterministic_algorithms"]


def test_what_differs_is_named_where_it_lies(tmp_path):
    begun = {"n": 3, "kernels": {"devices": ["cuda:0"], "torch": "2.13", "environment": {"OMP_NUM_THREADS": "1"}}}
    here = {"n": 3, "kernels": {"devices": ["cpu"], "torch": "2.13", "environment": {}}}
    RunFolder(tmp_path / "run", begun)
    said = (
        "got kernels.devices = ['cuda:0'], kernels.environment.OMP_NUM_THREADS = '1'; expected "
        "kernels.devices = ['cpu'], kernels.environment.OMP_NUM_THREADS = None. Go on where the run began"
    )
    with pytest.raises(StorageError, match=re.escape(said)):
        RunFolder(tmp_path / "run", here)
    with pytest.raises(StorageError, match=r"got n = 3; expected n = 4\. Give another folder"):
        RunFolder(tmp_path / "run", begun | {"n": 4})
    RunFolder(tmp_path / "run", begun)
