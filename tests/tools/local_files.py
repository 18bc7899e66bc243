"""Small files that other projects' examples take for what they would download."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

WORDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in "aeiou"]

GLUE_METRIC = """
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        columns = {name: datasets.Value("int64") for name in ("predictions", "references")}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(columns))

    def _compute(self, predictions, references):
        return {"accuracy": sum(map(int.__eq__, predictions, references)) / len(references)}
"""


def sentences(number: int, seed: int) -> list[str]:
    """Twelve words each, of no language."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=12)) for _ in range(number)]


def write_bert(folder: Path) -> None:
    """A tokenizer of whole words, and a BERT of two layers with random weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    special = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    vocabulary = {token: number for number, token in enumerate([*special.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **special).save_pretrained(folder)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    BertForSequenceClassification(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)


def write_glue(folder: Path) -> None:
    """Pairs of sentences under ``nyu-mll/glue`` as its configuration ``mrpc``, and ``glue`` as a metric."""
    data, metric = folder / "nyu-mll" / "glue", folder / "glue"
    data.mkdir(parents=True)
    metric.mkdir()
    parts = {"train": 640, "validation": 40, "test": 40}  # 40 batches of 16: on 16 ranks, two of each
    for seed, (name, number) in enumerate(parts.items()):
        pairs = zip(sentences(number, seed), sentences(number, 10 + seed), strict=True)
        rows = [{"sentence1": a, "sentence2": b, "label": i % 2, "idx": i} for i, (a, b) in enumerate(pairs)]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [{"split": name, "path": f"{name}.jsonl"} for name in parts]
    # The card's header is YAML, and JSON is valid YAML.
    (data / "README.md").write_text(
        f"---\nconfigs: {json.dumps([{'config_name': 'mrpc', 'data_files': files}])}\n---\n"
    )
    (metric / "glue.py").write_text(GLUE_METRIC)


def write_text(file: Path) -> None:
    """A text, of 200,000 words: Lightning's example keeps 4,000 pieces of 35 for its other splits."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(sentences(16_000, 0)) + "\n")


def write_digits(folder: Path) -> None:
    """MNIST's files in their own format: all images black, all labels 0, no page written."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, number in (("train", 60_000), ("t10k", 10_000)):
        with (raw / f"{name}-images-idx3-ubyte").open("wb") as images:
            images.write(struct.pack(">4i", 2051, number, 28, 28))
            images.truncate(16 + number * 28 * 28)
        with (raw / f"{name}-labels-idx1-ubyte").open("wb") as labels:
            labels.write(struct.pack(">2i", 2049, number))
            labels.truncate(8 + number)
