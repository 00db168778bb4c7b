"""Sentences of different lengths, packed into one array a batch for an embedding bag, and either loader.

    python docs/examples/text.py --loader agnoload    # or torch: the same loss

`ragged_collate` does what the function for torch does by hand.
"""

import argparse

import numpy as np
import torch

import agnoload

SENTENCES = [
    ("a fine film with a warm heart", 1),
    ("dull", 0),
    ("i would see it again and again", 1),
    ("two hours that nobody gives back", 0),
    ("funny and sad and true", 1),
    ("the worst of the year by far", 0),
    ("go", 1),
    ("a plot without a point and a point without a plot", 0),
] * 8


class Sentences:
    """Token numbers (int64, as many as there are words) and a label."""

    def __init__(self) -> None:
        words = sorted({word for text, _ in SENTENCES for word in text.split()})
        self.vocabulary = {word: number for number, word in enumerate(words)}

    def __len__(self) -> int:
        return len(SENTENCES)

    def __getitem__(self, index: int) -> dict[str, np.ndarray | int]:
        text, label = SENTENCES[index]
        return {"tokens": np.array([self.vocabulary[word] for word in text.split()]), "label": label}


def pack(samples):
    """All tokens of the batch one after the other, and where each sentence begins and ends."""
    lengths = [len(sample["tokens"]) for sample in samples]
    values = torch.cat([torch.from_numpy(sample["tokens"]) for sample in samples])
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    return {"tokens": (values, offsets), "label": torch.tensor([sample["label"] for sample in samples])}


def main() -> None:
    parser = argparse.ArgumentParser(description="Tell good reviews from bad ones.")
    parser.add_argument("--loader", choices=["agnoload", "torch"], default="agnoload")
    options = parser.parse_args()
    dataset = Sentences()
    if options.loader == "torch":
        loader = torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=pack)
    else:
        collate = agnoload.ragged_collate(form="packed", fields=["tokens"])
        loader = agnoload.DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=collate, backend="torch")

    torch.manual_seed(0)
    bag = torch.nn.EmbeddingBag(len(dataset.vocabulary), 8, include_last_offset=True)
    head = torch.nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*bag.parameters(), *head.parameters()], lr=1e-2)
    for _ in range(5):
        for batch in loader:
            values, offsets = batch["tokens"]
            loss = torch.nn.functional.cross_entropy(head(bag(values, offsets)), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"loss: {loss.item():.6f}")


if __name__ == "__main__":
    main()
