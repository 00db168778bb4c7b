"""Training loops of others over our loader: compiled, in several processes, Lightning's and accelerate's."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
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


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


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


def test_data_parallel_takes_the_fields_of_a_batch(torch: Any) -> None:
    model = torch.nn.Linear(4, 1)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    parallel = torch.nn.DataParallel(model)
    with DataLoader(Rows(), 16, seed=0, num_workers=2, backend="torch") as loader:
        outputs = [parallel(batch["x"]).cpu() for batch in loader]
    assert [tuple(output.shape) for output in outputs] == [(16, 1)] * 4
    with DataLoader(Rows(), 16, seed=0, backend="torch") as loader:
        for output, batch in zip(outputs, loader, strict=True):
            torch.testing.assert_close(output, model(batch["x"].to(model.weight.device)).cpu())


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
def test_two_processes_train_as_one_does(start: Any, ended: Any, torch: Any, how: str) -> None:
    port = free_port()
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


LIGHTNING = (
    TRAINING
    + """
    import warnings
    import lightning.pytorch as pl
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".isinstance.treespec, LeafSpec.. is deprecated", module="lightning")
    warnings.filterwarnings("ignore", "You defined a .validation_step. but have no .val_dataloader.")
    warnings.filterwarnings("ignore", "Be aware that when using .ckpt_path., callbacks used to create the checkpoint")

    class Line(pl.LightningModule):
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

    def data(**options):
        return agnoload.DataLoader(Rows(), 10, shuffle=True, seed=3, backend="torch", **options)
    """
)

LIGHTNING_ALONE = (
    LIGHTNING
    + """
    from lightning.pytorch.callbacks import ModelCheckpoint
    folder = sys.argv[1]
    whole = Line()
    with data(num_workers=1) as loader, agnoload.DataLoader(Rows(), 20, num_workers=1, backend="torch") as held_out:
        trainer().fit(whole, loader, held_out)
    loader = data()
    assert whole.trained == [(b["index"].tolist(), b["x"][:, 3].tolist()) for _ in range(3) for b in loader]
    rows = [[*range(20)], [*range(20, 40)], [*range(40, 50)]]
    assert whole.validated == [*rows[:2], *rows * 3]  # two batches to see that it works, then each epoch

    first = Line()
    saver = ModelCheckpoint(dirpath=folder, filename="place", every_n_train_steps=8)
    trainer(max_steps=8, enable_checkpointing=True, callbacks=[saver]).fit(first, data(num_workers=1))
    rest = Line()
    trainer().fit(rest, data(num_workers=1), ckpt_path=folder + "/place.ckpt")
    assert (len(first.trained), len(rest.trained)) == (8, 7)  # five batches an epoch
    assert first.trained + rest.trained == whole.trained
    assert torch.equal(rest.layer.weight, whole.layer.weight)
    print("ok")
    """
)


@pytest.mark.slow
def test_lightning_trains_validates_and_resumes_within_an_epoch(
    start: Any, ended: Any, torch: Any, tmp_path: Path
) -> None:
    needs("lightning")
    assert ended(start(LIGHTNING_ALONE, str(tmp_path)))[0].splitlines()[-1] == "ok"


LIGHTNING_RANK = (
    LIGHTNING
    + """
    class Shared(Line):
        def train_dataloader(self):  # called when Lightning has told torch the rank
            sampler = agnoload.DistributedSampler(Rows(), tail="drop")
            return agnoload.DataLoader(Rows(), 5, sampler=sampler, seed=3, num_workers=1, backend="torch")

    line = Shared()
    trainer(max_epochs=2, devices=2, strategy="ddp").fit(line)
    print([[i for i, _ in line.trained], line.layer.weight.tolist()])
    """
)


@pytest.mark.slow
def test_lightning_in_two_processes_trains_on_the_shares_of_one_order(start: Any, ended: Any, torch: Any) -> None:
    needs("lightning")
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    outputs = ended(*[start(LIGHTNING_RANK, **group, LOCAL_RANK=str(rank)) for rank in range(2)])
    (first, weights), (second, same) = (eval(out.splitlines()[-1]) for out in outputs)
    assert weights == same
    whole = iter(DataLoader(range(50), 10, shuffle=True, seed=3).steps(10))
    for one, other in zip(first, second, strict=True):
        batch = next(whole).tolist()
        assert (one, other) == (batch[0::2], batch[1::2])


ACCELERATE = (
    TRAINING
    + """
    import warnings, accelerate
    warnings.simplefilter("error")

    def prepared(loader):
        accelerator = accelerate.Accelerator(cpu=True)
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        net, optimizer, same = accelerator.prepare(net, optimizer, loader)
        assert same is loader
        accelerator.register_for_checkpointing(loader)
        return accelerator, net, optimizer

    def trained(accelerator, net, optimizer, batches):
        seen = []
        for batch in batches:
            loss = ((net(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
            accelerator.backward(loss)
            optimizer.step(); optimizer.zero_grad()
            seen.append((accelerator.gather_for_metrics(batch["index"]).tolist(), batch["x"][:, 3].tolist()))
        return seen
    """
)

ACCELERATE_ALONE = (
    ACCELERATE
    + """
    def data(**options):
        return agnoload.DataLoader(Rows(), 10, shuffle=True, seed=3, backend="torch", **options)

    loader = data()
    whole = [(b["index"].tolist(), b["x"][:, 3].tolist()) for b in loader.steps(12)]
    with data(num_workers=1) as loader:
        parts = prepared(loader)
        seen = trained(*parts, loader.steps(7))
        parts[0].save_state(sys.argv[1])
    with data(num_workers=1) as loader:
        parts = prepared(loader)
        parts[0].load_state(sys.argv[1])
        seen += trained(*parts, loader)
        seen += trained(*parts, loader.steps(2))
    assert seen == whole
    skipping = accelerate.skip_first_batches(data(num_workers=1), 2)  # it takes torch's own loader apart
    try:
        next(iter(skipping))
    except TypeError:
        pass
    else:
        raise SystemExit("it gave batches of another loader's")
    print("ok")
    """
)


@pytest.mark.slow
def test_accelerate_takes_the_loader_unchanged_and_resumes_it(
    start: Any, ended: Any, torch: Any, tmp_path: Path
) -> None:
    needs("accelerate")
    assert ended(start(ACCELERATE_ALONE, str(tmp_path), OMP_NUM_THREADS="1"))[0].splitlines()[-1] == "ok"


ACCELERATE_RANK = (
    ACCELERATE
    + """
    accelerate.Accelerator(cpu=True)  # from here on torch knows the rank
    sampler = agnoload.DistributedSampler(Rows(), tail="drop")
    with agnoload.DataLoader(Rows(), 5, sampler=sampler, seed=3, num_workers=1, backend="torch") as loader:
        accelerator, net, optimizer = prepared(loader)
        assert (sampler.rank, sampler.num_replicas) == (accelerator.process_index, 2)
        seen = trained(accelerator, net, optimizer, loader)
    print([[i for i, _ in seen], accelerator.unwrap_model(net).weight.tolist()])
    accelerator.end_training()
    """
)


@pytest.mark.slow
def test_accelerate_in_two_processes_gathers_whole_batches_of_one_order(start: Any, ended: Any, torch: Any) -> None:
    needs("accelerate")
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    outputs = ended(*[start(ACCELERATE_RANK, **group, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)])
    first, second = (eval(out.splitlines()[-1]) for out in outputs)
    assert first == second
    for gathered, batch in zip(first[0], DataLoader(range(50), 10, shuffle=True, seed=3), strict=True):
        assert gathered == [*batch[0::2].tolist(), *batch[1::2].tolist()]
