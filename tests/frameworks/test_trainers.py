"""Training loops of others over our loader: compiled, in several processes, Lightning's and accelerate's.

Importing the frameworks takes most of the time: one program trains alone in every way, and two as a group.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from typing import Any

import numpy as np
import pytest

import agnoload
from agnoload import DataLoader

pytestmark = pytest.mark.slow


class Rows(agnoload.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        x = np.float32([index % 8, index % 5, 1, agnoload.sample_rng().normal()])
        return {"x": x, "y": np.float32(x[:3] @ np.float32([1, -2, 3])), "index": index, "name": f"row {index}"}


def test_a_compiled_step_takes_batches_without_a_break_or_a_new_graph() -> None:
    torch = pytest.importorskip("torch")
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = torch.nn.Linear(4, 1)
    parallel = torch.nn.DataParallel(model)

    @torch.compile(backend=backend, fullgraph=True, dynamic=False)  # type: ignore[untyped-decorator]
    def loss(batch: Any) -> Any:
        return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()

    try:
        with DataLoader(Rows(), 16, shuffle=True, seed=0, num_workers=2, backend="torch") as loader:
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            losses = []
            for batch in loader.steps(12):
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
    if not torch.cuda.is_available():  # where there is a GPU it wants the model on one
        torch.testing.assert_close(parallel(batch["x"]), model(batch["x"]))


TRAINING = """
    import json, os, sys, warnings
    import numpy as np, torch, agnoload
    try:
        import lightning.pytorch as pl
        from lightning.pytorch.callbacks import ModelCheckpoint
    except ImportError:
        pl = None
    try:
        import accelerate
    except ImportError:
        accelerate = None
    torch.set_num_threads(1)
    found = {}

    class Rows(agnoload.Dataset):
        def __len__(self): return 50
        def __getitem__(self, i):
            x = np.float32([i % 8, i % 5, 1, agnoload.sample_rng().normal()])
            return {"x": x, "y": np.float32(x[:3] @ np.float32([1, -2, 3])), "index": i}

    def data(**options):
        return agnoload.DataLoader(Rows(), 10, shuffle=True, seed=3, backend="torch", **options)

    def share(**options):
        sampler = agnoload.DistributedSampler(Rows(), tail="drop")
        return sampler, agnoload.DataLoader(Rows(), 5, sampler=sampler, seed=3, num_workers=1, backend="torch")

    def model():
        torch.manual_seed(0)
        return torch.nn.Linear(4, 1)

    def train(model, loader):
        seen = []
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(2):
            for batch in loader:
                loss = ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
                optimizer.zero_grad(); loss.backward(); optimizer.step()
                seen.append(batch["index"].tolist())
        return seen

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".isinstance.treespec, LeafSpec.. is deprecated", module="lightning")
    warnings.filterwarnings("ignore", "You defined a .validation_step. but have no .val_dataloader.")
    warnings.filterwarnings("ignore", "Be aware that when using .ckpt_path., callbacks used to create the checkpoint")

    class Line(*([pl.LightningModule] if pl else [])):
        def __init__(self):
            super().__init__()
            self.layer, self.trained, self.validated = model(), [], []
        def training_step(self, batch, number):
            self.trained.append((batch["index"].tolist(), batch["x"][:, 3].tolist()))
            return ((self.layer(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
        def validation_step(self, batch, number):
            self.validated.append(batch["index"].tolist())
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    def trainer(**options):
        options = {"max_epochs": 3, "enable_checkpointing": False} | options
        return pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                          **options)

    def prepared(loader):
        accelerator = accelerate.Accelerator(cpu=True)
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        net, optimizer, same = accelerator.prepare(net, optimizer, loader)
        assert same is loader
        accelerator.register_for_checkpointing(loader)
        return accelerator, net, optimizer

    def accelerated(accelerator, net, optimizer, batches):
        seen = []
        for batch in batches:
            loss = ((net(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
            accelerator.backward(loss)
            optimizer.step(); optimizer.zero_grad()
            seen.append((accelerator.gather_for_metrics(batch["index"]).tolist(), batch["x"][:, 3].tolist()))
        return seen
"""

ALONE = (
    TRAINING
    + """
    net = model()
    found["torch"] = [train(net, data()), net.weight.tolist(), net.bias.tolist()]

    if pl:
        whole = Line()
        with data(num_workers=1) as loader, agnoload.DataLoader(Rows(), 20, num_workers=1, backend="torch") as held_out:
            trainer().fit(whole, loader, held_out)
        loader = data()
        assert whole.trained == [(b["index"].tolist(), b["x"][:, 3].tolist()) for _ in range(3) for b in loader]
        rows = [[*range(20)], [*range(20, 40)], [*range(40, 50)]]
        assert whole.validated == [*rows[:2], *rows * 3]  # two batches to see that it works, then each epoch

        first = Line()
        saver = ModelCheckpoint(dirpath=sys.argv[1] + "/lightning", filename="place", every_n_train_steps=8)
        trainer(max_steps=8, enable_checkpointing=True, callbacks=[saver]).fit(first, data(num_workers=1))
        rest = Line()
        trainer().fit(rest, data(num_workers=1), ckpt_path=sys.argv[1] + "/lightning/place.ckpt")
        assert (len(first.trained), len(rest.trained)) == (8, 7)  # five batches an epoch
        assert first.trained + rest.trained == whole.trained
        assert torch.equal(rest.layer.weight, whole.layer.weight)
        found["lightning"] = "ok"

    if accelerate:
        loader = data()
        whole = [(b["index"].tolist(), b["x"][:, 3].tolist()) for b in loader.steps(12)]
        with data(num_workers=1) as loader:
            parts = prepared(loader)
            seen = accelerated(*parts, loader.steps(7))
            parts[0].save_state(sys.argv[1] + "/accelerate")
        with data(num_workers=1) as loader:
            parts = prepared(loader)
            parts[0].load_state(sys.argv[1] + "/accelerate")
            seen += accelerated(*parts, loader)
            seen += accelerated(*parts, loader.steps(2))
        assert seen == whole
        skipping = accelerate.skip_first_batches(data(num_workers=1), 2)  # it takes torch's own loader apart
        try:
            next(iter(skipping))
        except TypeError:
            found["accelerate"] = "ok"
    print(json.dumps(found))
    """
)

RANK = (
    TRAINING
    + """
    rank, ports = int(sys.argv[1]), sys.argv[2:]
    group = {"rank": rank, "world_size": 2, "init_method": f"tcp://127.0.0.1:{ports[0]}"}
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "NODE_RANK": "0",
                 "MASTER_ADDR": "127.0.0.1"}

    def trained():
        sampler, loader = share()
        with loader:
            assert (sampler.rank, sampler.num_replicas, len(loader)) == (rank, 2, 5)
            net = torch.nn.parallel.DistributedDataParallel(model())
            seen = train(net, loader)
        torch.distributed.destroy_process_group()
        return [seen, net.module.weight.tolist(), net.module.bias.tolist()]

    torch.distributed.init_process_group("gloo", **group)
    found["group"] = trained()
    os.environ.update(variables, MASTER_PORT=ports[1])
    torch.distributed.init_process_group("gloo")
    found["environment"] = trained()

    if pl:
        class Shared(Line):
            def train_dataloader(self):  # called when Lightning has told torch the rank
                return share()[1]

        os.environ.update(MASTER_PORT=ports[2])
        line = Shared()
        trainer(max_epochs=2, devices=2, strategy="ddp").fit(line)
        found["lightning"] = [[i for i, _ in line.trained], line.layer.weight.tolist()]
        torch.distributed.destroy_process_group()

    if accelerate:
        os.environ.update(variables, MASTER_PORT=ports[3])
        accelerate.Accelerator(cpu=True)  # from here on torch knows the rank
        sampler, loader = share()
        with loader:
            accelerator, net, optimizer = prepared(loader)
            assert (sampler.rank, sampler.num_replicas) == (accelerator.process_index, 2)
            seen = accelerated(accelerator, net, optimizer, loader)
        found["accelerate"] = [[i for i, _ in seen], accelerator.unwrap_model(net).weight.tolist()]
        accelerator.end_training()
    print(json.dumps(found))
    """
)


def free_ports(count: int) -> list[str]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [str(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture(scope="module")
def trained(start: Any, ended: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program that trains alone and the two of a group have seen and learnt, for each trainer."""
    for module in ("torch", "lightning", "accelerate"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    ports = free_ports(4)
    ranks = [start(RANK, str(rank), *ports, OMP_NUM_THREADS="1") for rank in range(2)]
    programs = [start(ALONE, os.fspath(tmp_path_factory.mktemp("saved")), OMP_NUM_THREADS="1"), *ranks]
    alone, first, second = (json.loads(out.splitlines()[-1]) for out in ended(*programs))
    return {"alone": alone, "ranks": [first, second]}


@pytest.mark.parametrize("how", ["group", "environment"])
def test_two_processes_train_as_one_does(trained: Any, how: str) -> None:
    alone, (first, second) = trained["alone"]["torch"], [rank[how] for rank in trained["ranks"]]
    assert first[1:] == second[1:]
    for batch, halves in zip(alone[0], zip(first[0], second[0], strict=True), strict=True):
        assert (halves[0], halves[1]) == (batch[0::2], batch[1::2])
    for ours, theirs in zip(first[1:], alone[1:], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_lightning_trains_validates_and_resumes_within_an_epoch(trained: Any) -> None:
    assert trained["alone"]["lightning"] == "ok"


def test_lightning_in_two_processes_trains_on_the_shares_of_one_order(trained: Any) -> None:
    (first, weights), (second, same) = (rank["lightning"] for rank in trained["ranks"])
    assert weights == same
    whole = iter(DataLoader(range(50), 10, shuffle=True, seed=3).steps(10))
    for one, other in zip(first, second, strict=True):
        batch = next(whole).tolist()
        assert (one, other) == (batch[0::2], batch[1::2])


def test_accelerate_takes_the_loader_unchanged_and_resumes_it(trained: Any) -> None:
    assert trained["alone"]["accelerate"] == "ok"


def test_accelerate_in_two_processes_gathers_whole_batches_of_one_order(trained: Any) -> None:
    first, second = (rank["accelerate"] for rank in trained["ranks"])
    assert first == second
    for gathered, batch in zip(first[0], DataLoader(range(50), 10, shuffle=True, seed=3), strict=True):
        assert gathered == [*batch[0::2].tolist(), *batch[1::2].tolist()]
