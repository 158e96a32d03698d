"""The visiting order: random, and yet a function of names and step."""

# K components, T tasks

from collections import Counter
from itertools import permutations

import torch

from gradvac.rules.pairwise import fixed_order, name_keys, random_order

TASKS = ["en-fr", "en-cs", "en-hi", "en-tr"]


def order(
    step: int, tasks: list[str], *, components: tuple[str, ...] = ("encoder",), seed: int = 0
) -> dict[tuple[str, str], tuple[str, ...]]:
    """(component, task) -> names of the others in visiting order."""
    drawn = random_order(seed, torch.tensor(step), name_keys(components), name_keys(tasks))
    assert drawn.shape == (len(components), len(tasks), len(tasks) - 1)
    return {
        (component, task): tuple(tasks[j] for j in row)
        for component, rows in zip(components, drawn.tolist(), strict=True)
        for task, row in zip(tasks, rows, strict=True)
    }


def test_everyone_else_is_visited_once() -> None:
    for step in range(50):
        for (_, task), others in order(step, TASKS).items():
            assert sorted([task, *others]) == sorted(TASKS)


def test_all_orders_are_equally_likely() -> None:
    """Chi-squared over the six orders of three others; 30 is beyond 1 in 10,000."""
    num_steps = 1200
    for task in TASKS:
        seen = Counter(order(step, TASKS)["encoder", task] for step in range(num_steps))
        expected = num_steps / 6
        others = [other for other in TASKS if other != task]
        statistic = sum((seen[o] - expected) ** 2 / expected for o in permutations(others))
        assert statistic < 30


def test_tasks_and_components_draw_independently() -> None:
    components = ("encoder", "decoder")
    agree = {"components": 0, "tasks": 0, "steps": 0, "seeds": 0}
    num_steps = 600
    for step in range(num_steps):
        drawn = order(step, TASKS, components=components)
        encoder = drawn["encoder", "en-fr"]
        agree["components"] += encoder == drawn["decoder", "en-fr"]
        shared = [t for t in encoder if t != "en-cs"]
        agree["tasks"] += shared == [t for t in drawn["encoder", "en-cs"] if t != "en-fr"]
        agree["steps"] += encoder == order(step + 1, TASKS)["encoder", "en-fr"]
        agree["seeds"] += encoder == order(step, TASKS, seed=1)["encoder", "en-fr"]
    for what, expected in (
        ("components", 1 / 6),
        ("steps", 1 / 6),
        ("seeds", 1 / 6),
        ("tasks", 0.5),
    ):
        assert abs(agree[what] / num_steps - expected) < 0.08, what


def test_the_list_of_tasks_does_not_matter() -> None:
    for step in range(20):
        expected = order(step, TASKS)
        assert order(step, TASKS[::-1]) == expected
        # An absent task leaves the others in their order.
        fewer = order(step, [task for task in TASKS if task != "en-hi"])
        for key, others in fewer.items():
            assert others == tuple(t for t in expected[key] if t != "en-hi")


def test_a_component_alone_draws_the_same() -> None:
    both = order(7, TASKS, components=("encoder", "decoder"))
    alone = order(7, TASKS, components=("decoder",))
    assert all(both[key] == others for key, others in alone.items())


def test_fixed_order_is_by_rank() -> None:
    found = fixed_order(torch.tensor([2, 0, 1]), 2)
    assert found.tolist() == [[[1, 2], [2, 0], [1, 0]]] * 2
