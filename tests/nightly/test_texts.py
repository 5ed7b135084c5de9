"""A model of transformers on a data set of Hugging Face: the page's files and commands."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dni_runtime import Run
from tests.e2e.conftest import missing
from tests.e2e.pages import commands, section, shell, write_files

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PAGE, HEADING = "goals.md", "A classifier of texts"
KINDS = (["bad", "poor", "dull", "weak"], ["good", "great", "fine", "nice"])
OTHERS = ["the", "film", "was", "and", "a", "plot", "with"]


def reviews(count: int, vocabulary: dict[str, int]) -> list[dict[str, object]]:
    """Rows of different lengths; a word or two tells their kind."""
    rows = []
    for _ in range(count):
        label = random.randrange(2)
        words = random.choices(OTHERS, k=random.randrange(3, 20))
        for _ in range(2):
            words.insert(random.randrange(len(words)), random.choice(KINDS[label]))
        tokens = [vocabulary[word] for word in words]
        rows.append({"input_ids": tokens, "attention_mask": [1] * len(tokens), "label": label})
    return rows


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the page's reader has: a small DistilBERT, its tokenizer, data sets on disk."""
    if find_spec("transformers") is None or find_spec("datasets") is None:
        missing("transformers and datasets are not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from datasets import Dataset, disable_progress_bars
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        DistilBertConfig,
        DistilBertForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    random.seed(0)
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", *KINDS[0], *KINDS[1], *OTHERS]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    bert = tmp_path / "bert"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(bert)
    config = DistilBertConfig(
        vocab_size=len(words), dim=32, n_heads=2, n_layers=2, hidden_dim=64,
        max_position_embeddings=32,
    )  # fmt: skip
    DistilBertForSequenceClassification(config).save_pretrained(bert)
    disable_progress_bars()
    for part, count in (("train", 800), ("test", 200)):
        Dataset.from_list(reviews(count, vocabulary)).save_to_disk(tmp_path / "reviews" / part)
    write_files(section(PAGE, HEADING), tmp_path)
    return tmp_path


def test_a_classifier_of_texts(folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    lines = commands(PAGE, HEADING)
    assert len(lines.splitlines()) == 4
    shell(lines, folder)
    (root,) = (folder / "runs").iterdir()
    run = Run.open(root)
    assert run.status().accuracy > 0.9
    assert "datasets==" in (folder / "chain.yaml").read_text(), "what an image needs"
    before, after = (
        AutoModelForSequenceClassification.from_pretrained(folder / name).state_dict()
        for name in ("bert", "trained")
    )
    trained = run.state_dict()
    assert all(torch.equal(trained[name], value) for name, value in after.items())
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith("distilbert.embeddings.")}
