"""What a process does not import, because nobody waits for it gladly."""

import subprocess
import sys

GRADIENTS = """
import sys
import torch
import fedvlm

g = torch.Generator().manual_seed(0)
def units(n):
    return torch.nn.functional.normalize(torch.randn(n, 16, generator=g), dim=1)
rows = {id: (units(24), torch.arange(24) % 3) for id in "ab"}
told = dict(clients=rows, classes=("x", "y", "z"), text=units(3), rounds=2)
for name in sys.argv[1:]:
    for engine in ("batched", "single"):
        fedvlm.run(name, engine=engine, **told)

from fedvlm.runner import run

def train(*given, usual=run._train):
    found = usual(*given)
    assert torch.get_num_threads() == 1 and "torch._dynamo" not in sys.modules
    return found

run._train = train
fedvlm.run("fedgh", workers=2, seeds=[0, 1], **told)
assert "torch._dynamo" not in sys.modules
f = torch.compile(lambda x: x + 1, backend="eager")
assert f(torch.ones(2)).tolist() == [2, 2] and "torch._dynamo" in sys.modules
assert torch._dynamo is sys.modules["torch._dynamo"]
assert torch.func.grad(lambda x: (x * x).sum())(torch.ones(2)).tolist() == [2, 2]
"""


def run(script, *given, **more):
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, given)], capture_output=True, text=True, **more
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_a_gradient_imports_no_compiler_in_any_process_and_leaves_it_to_those_who_compile():
    run(GRADIENTS, "fedavg", "fedot", "fedadapter", "fedgh")
