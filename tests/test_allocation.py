"""Memory given back: less of it resident, and everything still works."""

import subprocess
import sys

import pytest

CODE = """
import torch

from asrmask.allocation import loading


def code_mb():
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("RssFile"))
    return int(line.split()[1]) / 1024


before = code_mb()
with loading():
    inside = code_mb()
x = torch.randn(64, 64)
assert torch.allclose((x @ x.T).T, x @ x.T, atol=1e-4)
print(before, inside)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from Linux's /proc")
def test_the_code_of_start_up_is_let_go_before_a_model_is_loaded():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    before, inside = map(float, done.stdout.split())
    assert inside < before / 2
