"""A rule of your own: every task contributes a gradient of the same length, in every layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradvac import Aligner, Rule, Weighing, gram


class EqualNorms(Rule):
    """Give all task gradients of a component their mean length, then add them up."""

    def weigh_finite(self, _: Sequence[int], gram_matrices: Tensor) -> Weighing:
        """Weights `[K, T]` from Gram matrices `[K, T, T]`, in a batch with two tasks or more."""
        lengths = gram.norms(gram_matrices)  # [K, T]
        weights = lengths.mean(-1, keepdim=True) * gram.reciprocal(lengths)  # 0 for a zero gradient
        return self.answer(gram_matrices, weights)


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
aligner = Aligner(model, tasks=["loud", "quiet"], rule=EqualNorms())

x = torch.randn(6, 4)
scale = torch.tensor([100.0, 100.0, 100.0, 1.0, 1.0, 1.0])  # of the losses: "loud" would dominate
for _ in range(3):
    losses = (model(x)[:, 0] - 1.0).square() * scale / 6
    optimizer.zero_grad()
    alignment = aligner.backward(losses, ["loud"] * 3 + ["quiet"] * 3)
    optimizer.step()

print("lengths of the gradients:", alignment.norms[0].tolist())
print("what each contributes:   ", (alignment.weights * alignment.norms)[0].tolist())
assert torch.allclose(*(alignment.weights * alignment.norms)[0])
