"""``dnictl exits``: what it prints and writes of a small chain that was trained here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dni_runtime.api.checkpointed import Checkpointed
from dni_runtime.core.chain import LocalChain
from dni_runtime.core.exits import Answers, early_head
from dni_runtime.data import open_data
from dni_runtime.plan.create import create_run
from dni_runtime.plan.prepare import prepare
from dni_runtime.run.documents.exits import Exits
from dni_runtime.run.record import Record
from dni_runtime.worker.checkpoint import copy_state, write_part
from tests.unit.cli.conftest import Dnictl

CHAIN = """\
name: x
data: {dataset: digits, flatten: true, batch_size: 32, validation: 600}
defaults: {interface: %s, optimizer: {Adam: {lr: 0.01}}}
modules:
  - {name: a, layers: [{Linear: {in_features: 64, out_features: 80}}, {BatchNorm1d: {num_features: 80}}, ReLU]}
  - {name: b, layers: [{Linear: {in_features: 80, out_features: 16}}, ReLU]}
  - {name: c, layers: [{Linear: {in_features: 16, out_features: 10}}]}
"""  # noqa: E501


def trained(folder: Path, text: str) -> tuple[Checkpointed, LocalChain]:
    (folder / "chain.yaml").write_text(text)
    prepared = prepare(folder / "chain.yaml")
    made = create_run(folder / "runs" / "one", prepared, backend="process")
    chain = LocalChain(prepared.workers)
    for epoch in (1, 2):
        for x, y in open_data(prepared.chain.data, folder, seed=0).train_batches(epoch):
            chain.train_batch(x, y)
    for step in chain.steps:
        tensors, document = copy_state(step)
        write_part(made, step.spec.module, (tensors, document | {"cut": 5}))
    return Checkpointed(Record.read(made.root)), chain


def test_heads_of_the_training(dnictl: Dnictl, folder: Path) -> None:
    run, chain = trained(folder, CHAIN % "mixed")
    said = dnictl("exits", "one", "--exit-confidence", "0.8", "--json").json
    batches = list(open_data(run.record.specs()[0].data, folder, seed=0).eval_batches())
    x, y = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    outputs, h = [], x
    for step in chain.steps:
        h = step.evaluate(h)
        outputs.append(step.predict(h).softmax(1))
    whole = outputs[-1].argmax(1)
    assert (said["samples"], said["held_out"], said["checkpoint"]) == (600, True, 5)
    both = ("--exit-accuracy", "0.2", "--exit-confidence", "0.8")
    assert "exclude each other" in dnictl("exits", "one", *both).err
    assert [exit["module"] for exit in said["exits"]] == ["a", "b", "c"]
    for exit, p in zip(said["exits"], outputs, strict=True):
        assert exit["accuracy"] == pytest.approx(float((p.argmax(1) == y).float().mean()))
        assert exit["agreement"] == pytest.approx(float((p.argmax(1) == whole).float().mean()))
    numbers = torch.arange(600).expand(1, -1)
    checking = Answers(numbers, numbers).halves()[1].right_EN[0]
    sure = [(p.max(1).values >= 0.8)[checking] for p in outputs[:2]]
    leave = [sure[0], ~sure[0] & sure[1], ~sure[0] & ~sure[1]]
    rule = said["rules"][0]
    assert rule["leave"] == pytest.approx([float(one.float().mean()) for one in leave])
    early = torch.where(sure[0], outputs[0].argmax(1)[checking], whole[checking])
    early = torch.where(~sure[0] & sure[1], outputs[1].argmax(1)[checking], early)
    assert rule["accuracy"] == pytest.approx(float((early == y[checking]).float().mean()))
    assert said["exits"][0]["sends"] == {
        "float32": 320, "bfloat16": 160, "float16": 160, "int8": 80, "int8-channel": 80
    }  # fmt: skip
    assert (said["input_bytes"]["int8"], said["exits"][2]["sends"]["int8"]) == (64, 0)

    document = Exits.load(run.directory.exits)
    assert document is not None
    assert [rule.points for rule in document.rules] == [None, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
    spec = run.record.specs()[1][0]
    head = early_head(spec, document.exits[0].head, run.directory.exit_head("a"))  # type: ignore[arg-type]
    assert head is not None
    h = chain.steps[0].evaluate(x)
    torch.testing.assert_close(head.predict(h), chain.steps[0].predict(h))

    run.export(folder / "m.safetensors")
    assert json.loads((folder / "m.exits.json").read_text())["checkpoint"] == 5
    shown = dnictl("exits", "one", "--exit-accuracy", "5", "--figure", "exits.png")
    assert "lost by that on 300 samples that had no part in the choice: " in shown.out
    assert "what 'a' sends is larger than the input" in shown.err
    assert (folder / "exits.png").read_bytes().startswith(b"\x89PNG")
    undrawn = dnictl("exits", "one", "--figure", "exits.txt")
    assert "cannot be drawn" in undrawn.err
    assert "bytes of a sample" in undrawn.out, "nothing of it depends on the picture"
    run.directory.exits.unlink()  # the same weights, of which nothing is known
    run.export(folder / "m.safetensors")
    assert not (folder / "m.exits.json").exists()
    (folder / "m.exits.json").write_text('{"mine": 1}')
    run.export(folder / "m.safetensors")
    assert (folder / "m.exits.json").exists()


def test_heads_fitted_afterwards(dnictl: Dnictl, folder: Path) -> None:
    """They learn, the modules do not; a later look uses them."""
    run, _ = trained(folder, CHAIN % "exact")
    before = run.state_dict(5)
    refused = dnictl("exits", "one")
    assert refused.code == 64
    assert "'dnictl exits --retrain' fits heads to the finished modules" in refused.err
    said = dnictl("exits", "one", "--retrain", "--json").json
    assert said["exits"][0]["accuracy"] > 0.9
    kept = load_file(run.directory.exit_head("a"))
    later = dnictl("exits", "one", "--exit-accuracy", "3", "--json").json
    assert later["exits"] == said["exits"]
    assert later["rules"][0]["points"] == 3.0
    after = load_file(run.directory.exit_head("a"))
    assert all(torch.equal(kept[name], after[name]) for name in kept)
    assert all(torch.equal(before[name], value) for name, value in run.state_dict(5).items())


def test_only_classes_can_be_sure(dnictl: Dnictl, folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
    np.savez(folder / "d.npz", x_train=x, y_train=x[:, :1], x_eval=x, y_eval=x[:, :1])
    text = CHAIN.replace("dataset: digits, flatten: true", "dataset: npz, path: d.npz")
    text = text.replace("validation: 600", "validation: 8").replace("features: 10", "features: 1")
    trained(folder, f"loss: MSELoss\n{text % 'local'}")
    refused = dnictl("exits", "one")
    assert refused.code == 64
    assert "the output, float32[B x 1], is not one score for each class" in refused.err
