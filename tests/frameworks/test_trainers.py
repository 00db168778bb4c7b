"""Training loops of others over our loader: compiled, in several processes, Lightning's and accelerate's."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

import agnoload
from agnoload import DataLoader

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


def needs(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(*processes: subprocess.Popen[str]) -> list[str]:
    """What they print, once all have ended well."""
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return [out for out, _ in outputs]


class Rows(agnoload.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        x = np.float32([index % 8, index % 5, 1, agnoload.sample_rng().normal()])
        return {"x": x, "y": np.float32(x[:3] @ np.float32([1, -2, 3])), "index": index, "name": f"row {index}"}


def test_a_compiled_step_takes_batches_without_a_break_or_a_new_graph(torch: Any) -> None:
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = torch.nn.Linear(4, 1)

    @torch.compile(backend=backend, fullgraph=True, dynamic=False)  # type: ignore[untyped-decorator]
    def loss(batch: Any) -> Any:
        return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()

    try:
        with DataLoader(Rows(), 16, shuffle=True, seed=0, num_workers=2, backend="torch") as loader:
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            losses = []
            for _ in range(3):
                for batch in loader:
                    value = loss(batch)
                    optimizer.zero_grad()
                    value.backward()
                    optimizer.step()
                    losses.append(value.item())
    finally:
        torch._dynamo.reset()
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    assert len(graphs) == 1


TRAINING = """
    import sys
    import numpy as np, torch, agnoload
    torch.set_num_threads(1)

    class Rows(agnoload.Dataset):
        def __len__(self): return 50
        def __getitem__(self, i):
            x = np.float32([i % 8, i % 5, 1, agnoload.sample_rng().normal()])
            return {"x": x, "y": np.float32(x[:3] @ np.float32([1, -2, 3])), "index": i}

    def train(model, loader):
        seen = []
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(2):
            for batch in loader:
                loss = ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
                optimizer.zero_grad(); loss.backward(); optimizer.step()
                seen.append(batch["index"].tolist())
        return seen

    def model():
        torch.manual_seed(0)
        return torch.nn.Linear(4, 1)
"""

SHARED = (
    TRAINING
    + """
    port, rank, how = sys.argv[1:]
    if how == "environment":
        torch.distributed.init_process_group("gloo")
    else:
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2)
    sampler = agnoload.DistributedSampler(Rows(), tail="drop")
    with agnoload.DataLoader(Rows(), 5, sampler=sampler, seed=3, num_workers=1, backend="torch") as loader:
        assert (sampler.rank, sampler.num_replicas, len(loader)) == (int(rank), 2, 5)
        net = torch.nn.parallel.DistributedDataParallel(model())
        seen = train(net, loader)
    print([seen, net.module.weight.tolist(), net.module.bias.tolist()])
    torch.distributed.destroy_process_group()
    """
)

ALONE = (
    TRAINING
    + """
    net = model()
    seen = train(net, agnoload.DataLoader(Rows(), 10, shuffle=True, seed=3, backend="torch"))
    print([seen, net.weight.tolist(), net.bias.tolist()])
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["environment", "group"])
def test_two_processes_train_as_one_does(torch: Any, how: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"} if how == "environment" else {}
    ranks = [
        start(SHARED, port, str(rank), how, **variables, **({"RANK": str(rank)} if variables else {}))
        for rank in range(2)
    ]
    first, second, alone = (eval(out) for out in ended(*ranks, start(ALONE)))
    assert first[1:] == second[1:]
    for batch, halves in zip(alone[0], zip(first[0], second[0], strict=True), strict=True):
        assert (halves[0], halves[1]) == (batch[0::2], batch[1::2])
    for ours, theirs in zip(first[1:], alone[1:], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
