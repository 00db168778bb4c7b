"""A table in memory (569 tumours of 30 numbers each, from scikit-learn), a torch network, and either loader.

python docs/examples/tabular.py --loader agnoload    # or torch: the same loss
"""

import argparse

import torch
from sklearn.datasets import load_breast_cancer

import agnoload


def main() -> None:
    parser = argparse.ArgumentParser(description="Tell tumours apart.")
    parser.add_argument("--loader", choices=["agnoload", "torch"], default="agnoload")
    options = parser.parse_args()
    numbers, labels = load_breast_cancer(return_X_y=True)
    numbers = (numbers - numbers.mean(0)) / numbers.std(0)
    arrays = torch.tensor(numbers, dtype=torch.float32), torch.tensor(labels)
    if options.loader == "torch":
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*arrays), batch_size=64)
    else:
        loader = agnoload.DataLoader(agnoload.TensorDataset(*arrays), batch_size=64, backend="torch")

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(10):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"loss: {loss.item():.6f}")


if __name__ == "__main__":
    main()
