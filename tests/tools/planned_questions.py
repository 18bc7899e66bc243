"""Random questions for the search of partitions, and their answers by trying every order of cards and every cut."""

from __future__ import annotations

import itertools
import random
from typing import Any

from megastrategy.tools.plan.cards import Card
from megastrategy.tools.plan.search import Candidate, Question, evaluate
from megastrategy.tools.plan.stage_memory import Layer


def random_question(seed: int, **options: Any) -> Question:
    draw = random.Random(seed)
    layers = [
        Layer(
            name=f"{i}",
            forward_flops=draw.uniform(1, 9) * 1e9,
            backward_flops=draw.choice([0, 1, 2]) * 1e9,
            fixed_bytes=draw.randint(1, 9),
            saved_bytes=draw.randint(0, 4),
            forward_peak_bytes=draw.randint(0, 5),
            backward_peak_bytes=draw.randint(0, 5),
            input_bytes=draw.randint(0, 2),
            output_bytes=draw.randint(0, 2),
            saves_output=draw.choice([True, False]),
            input_needs_grad=draw.choice([True, False]),
        )
        for i in range(9)
    ]
    cards = [Card(name, memory, flops * 1e12) for name, memory, flops in [("a", 40, 3), ("a", 40, 3), ("b", 25, 1)]]
    return Question(layers, cards, draw.randint(1, 6), **options)


def by_brute_force(question: Question, objective: str) -> Candidate | None:
    fitting = []
    for order in set(itertools.permutations(question.cards)):
        for cuts in itertools.combinations(question.cuts, len(order) - 1):
            split = [b - a for a, b in itertools.pairwise([0, *cuts, len(question.layers)])]
            found = evaluate(question, order, split)
            if all(p <= c.memory_bytes * (1 - question.slack) for p, c in zip(found.peak_bytes, order, strict=True)):
                fitting.append(found)
    key = (lambda c: c.step_ms) if objective == "time" else (lambda c: c.waste)
    return min(fitting, key=key, default=None)
