"""Networks become chain files, from which the same network comes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dni_runtime import Chain
from dni_runtime.core.chain import LocalChain, inputs_of
from dni_runtime.core.export import connect
from dni_runtime.core.layers import build_module
from dni_runtime.errors import DataError, DniError, SpecError, UsageError
from dni_runtime.plan.prepare import importing_from, prepare
from dni_runtime.plan.splitting import SplitChain, settings_of, split_chain
from dnictl.main import cli

SOURCE = Path(__file__).parents[2] / "data" / "words.py"
SETTINGS = {"data": {"dataset": "words:Words", "batch_size": 8, "drop_last": True}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copy(SOURCE, tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("words", None)


def split(path: Path = Path("chain.yaml"), **given: Any) -> SplitChain:
    return split_chain("words:Model", path, SETTINGS, **given)


def whole(taken: SplitChain) -> nn.Module:
    """The network that the chain's modules make, with the weights of the file."""
    workers = taken.prepared.workers
    state = load_file(taken.weights)
    modules: dict[str, nn.Module] = {}
    with importing_from(Path.cwd()):
        for worker in workers:
            layers = build_module(worker, "cpu")
            prefix = "0.network."
            own = {key: state[key.removeprefix(prefix)] for key in layers.state_dict()}
            layers.load_state_dict(own)
            modules[worker.module] = layers

    class Network(nn.Module):
        def forward(self, *data: Tensor) -> Tensor:
            outputs: list[Tensor] = []
            for index, module in enumerate(modules.values()):
                outputs.append(module(*inputs_of(workers, index, outputs, data)))
            return outputs[-1]

    connect(dict(modules), [[]] * len(modules), [[0]] * len(modules))  # ties
    return Network()


FROZEN = """\
import torch
from torch import nn

class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(64, 8), nn.ReLU()), nn.Linear(8, 10)

    def forward(self, x):
        with torch.no_grad():
            h = self.body(x)
        return self.head(h)
"""


def test_a_chain_that_is_not_valid_replaces_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("frozen.py").write_text(FROZEN)
    settings = {"data": {"dataset": "digits", "batch_size": 64, "flatten": True}}
    kept, more = list[dict[str, bytes]](), {"at": ["body.0"], "interface": "exact"}
    for freeze in ([], ["body"], []):
        if freeze:
            split_chain("frozen:Frozen", Path("chain.yaml"), settings, freeze=freeze, **more)
        else:
            with pytest.raises(SpecError, match="'part-2' has no gradient") as caught:
                split_chain("frozen:Frozen", Path("chain.yaml"), settings, **more)
            assert caught.value.where == "modules[1].layers"
        files = filter(Path.is_file, Path().iterdir())
        kept.append({file.name: file.read_bytes() for file in files})
    assert kept[0].keys() == {"frozen.py"}
    assert kept[1].keys() == {"frozen.py", "chain.yaml", "chain.safetensors"}
    assert kept[2] == kept[1]
    sys.modules.pop("frozen")


def test_a_chain_is_the_network(folder: Path) -> None:
    taken = split(at=["begin", "first"])
    assert [part.until for part in taken.parts] == ["begin", "first", None]
    sys.path.insert(0, str(folder))
    import words  # type: ignore[import-not-found]

    model = words.Model()
    model.load_state_dict(load_file(taken.weights), strict=True)
    data = torch.randint(0, 7, (8, 5)), torch.rand(8, 5) < 0.5
    assert torch.equal(whole(taken)(*data), model(*data))
    text = (folder / "chain.yaml").read_text()
    assert "import: words:Model" in text
    assert "inputs: [part-1.0]\n" in text  # neither the mask nor the tied weights
    assert "inputs: [part-1.0, part-1.1, part-2, data.1]" in text


def test_cuts_are_chosen(folder: Path) -> None:
    taken = split(modules=3)
    assert len(taken.prepared.modules) == 3
    assert (
        sum(part.numbers for part in taken.parts) == (7 + 2) * 8 + 2 * 72 + 2 * 16
    )  # tied ones once
    assert all(part.seconds > 0 for part in taken.parts)
    lender = next(part for part in taken.parts if part.lends)
    assert lender.interface is not None
    assert lender.interface.name == "delayed"  # true gradients for tied weights


def test_a_part_may_need_nothing_but_the_batch_size(folder: Path) -> None:
    first, second = split(at=["kind"]).parts
    assert first.numbers == 2 * 8
    assert second.inputs == ("part-1", "data.0", "data.1")


def test_another_name_for_the_weights(folder: Path) -> None:
    torch.manual_seed(1)
    sys.path.insert(0, str(folder))
    import words

    model = words.Model()
    torch.save(model.state_dict(), "given.pt")
    taken = split(weights=Path("given.pt"))
    found = load_file(taken.weights)
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())
    tied = {key: value for key, value in found.items() if key != "head.weight"}
    save_file(tied, "given.safetensors")  # as transformers writes it
    split(weights=Path("given.safetensors"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("first.bias"), "lacks 'first.bias'"),
        (lambda state: state.update(more=torch.ones(1)), "has, beside the network, 'more'"),
        (
            lambda state: state.update({"first.bias": torch.ones(3)}),
            r"'first.bias' in .* has shape \[3\], in the network \[8\]",
        ),
        (lambda state: state.update(epoch=3), "holds no state dict"),
    ],
)
def test_weights_that_do_not_fit(folder: Path, change: Any, message: str) -> None:
    sys.path.insert(0, str(folder))
    import words

    state = dict(words.Model().state_dict())
    change(state)
    torch.save(state, "given.pt")
    with pytest.raises(DataError, match=message):
        split(weights=Path("given.pt"))


def test_a_pickle_is_refused(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    import words

    torch.save(words.Model(), "model.pt")
    with pytest.raises(DataError, match=r"is refused: it has more .*\n.*state_dict") as caught:
        split(weights=Path("model.pt"))
    assert "weights_only" not in str(caught.value), "torch advises to trust the file"
    with pytest.raises(DataError, match="there is no file"):
        split(weights=Path("nothing.pt"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"at": ["frist"]}, "cannot be cut after 'frist'"),
        ({"at": "frist"}, "cannot be cut after 'frist'"),
        ({"at": "first, secnd"}, "cannot be cut after 'secnd'"),
        ({"freeze": "frist"}, "no parameters of 'frist' to freeze"),
        ({"at": ["second", "first"]}, "is not the order in which the network runs"),
        ({"modules": 40}, r"can be cut in \d places, so that it has at most \d modules, not 40"),
        ({"takes": ["tokens"]}, "1 arguments of forward are named, and the data has 2 inputs"),
        ({"args": {"wide": 3}}, r"Model\(wide=3\) failed"),
        (
            {"args": {"words": 3}},
            r"fails on a batch of int64\[B x 5\], int64\[B x 5\] \(.*words.py:\d+\): IndexError",
        ),
    ],
)
def test_wrong_input(folder: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(DniError, match=message):
        split(**given)


def test_a_file_of_somebody_else_stays(folder: Path) -> None:
    Path("chain.yaml").write_text("name: mine\n")
    with pytest.raises(UsageError, match="'dnictl split' did not write it"):
        split()
    split(force=True)
    split()  # its own


TWICE = """
from torch import nn

class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.top = nn.Embedding(7, 8), nn.Linear(8, 7)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)

    def forward(self, tokens, mask):
        h = self.second(self.first(self.layer(self.words(tokens))))
        return self.top(self.layer(h))
"""


def test_a_layer_that_is_used_twice_lends_all_its_weights(folder: Path) -> None:
    (folder / "twice.py").write_text(TWICE)
    cuts = ["words", "first", "second"]
    taken = split_chain("twice:Twice", Path("chain.yaml"), SETTINGS, at=cuts)
    assert [len(part.lends) for part in taken.parts] == [0, 12, 0, 0]
    assert taken.prepared.chain.graph.takes == {(1, 2): (0,), (1, 3): tuple(range(1, 13))}
    shown = CliRunner().invoke(cli, ["validate"])
    assert "float32[B x 5 x 8] and 12 more" in shown.output


def test_small_batches_cannot_carry_tied_weights(folder: Path) -> None:
    split(at=["first"])
    text = Path("chain.yaml").read_text()
    Path("chain.yaml").write_text(text.replace("drop_last: true", "drop_last: false"))
    with pytest.raises(SpecError, match="the smallest training batch may have fewer"):
        Chain("chain.yaml")


def test_tied_weights_travel_with_each_part_of_a_batch(folder: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    tokens, y = torch.randint(0, 7, (2, 14, 5), generator=draw)
    mask = torch.rand(14, 5, generator=draw) < 0.8
    updated = []
    for count in (1, 4):
        defaults = {
            "interface": {"exact": {"micro_batches": count}},
            "optimizer": {"SGD": {"lr": 0.5}},
        }
        settings = {"data": {**SETTINGS["data"], "batch_size": 14}, "defaults": defaults}
        taken = split_chain("words:Model", Path("chain.yaml"), settings, at=["first"])
        with importing_from(folder):
            chain = LocalChain(taken.prepared.workers)
        chain.train_batch((tokens, mask), y)
        updated.append(chain.steps[0].layers.state_dict())
    for name, value in updated[0].items():
        torch.testing.assert_close(updated[1][name], value, msg=name)
    text = Path("chain.yaml").read_text()
    assert text.count("rows: 2}") == 2  # of parts of 4, 4, 4 and 2 samples
    Path("chain.yaml").write_text(text.replace("rows: 2}", "rows: 3}"))
    with pytest.raises(SpecError, match=r"may have fewer\n.*'rows: 2' wherever"):
        Chain("chain.yaml")


@pytest.mark.parametrize("field", ["dtype", "gradient_dtype"])
def test_one_scale_is_none_for_activations_and_tied_weights(folder: Path, field: str) -> None:
    split(at=["first"])
    plain = Path("chain.yaml").read_text()
    Path("chain.yaml").write_text(f"{plain}links: {{{field}: int8}}\n")
    with pytest.raises(SpecError, match="of which the small ones would become 0") as caught:
        Chain("chain.yaml")
    assert caught.value.path == f"links.{field}"
    Path("chain.yaml").write_text(f"{plain}links: {{{field}: int8-channel}}\n")
    Chain("chain.yaml")


def test_from_python(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    import words

    model = words.Model(size=16)
    chain = Chain.split(model, data={**SETTINGS["data"], "dataset": words.Words}, at=["first"])
    assert chain.modules == [part.name for part in chain.parts] == ["part-1", "part-2"]
    found = load_file("chain.safetensors")
    assert torch.equal(found["first.weight"], model.first.weight)
    again = Chain.split(words.Model, data=SETTINGS["data"], modules=2, returns=0)
    assert again.modules == chain.modules
    assert "returns: '0'\n" in Path("chain.yaml").read_text()
    with pytest.raises(UsageError, match="is a layer of torch"):
        Chain.split(nn.Linear(2, 2), data=SETTINGS["data"])


def test_the_commands(folder: Path) -> None:
    data = "{dataset: 'words:Words', batch_size: 8}"
    runner = CliRunner()
    done = runner.invoke(cli, ["split", "words:Model", "--data", data, "--at", "begin,second"])
    assert done.exit_code == 0, done.output
    assert "wrote chain.yaml and chain.safetensors" in done.output
    assert "delayed: tied weights" in done.output
    assert "your own check: dnictl compare chain.yaml" in done.output
    argv = ["split", "words:Model", "--data", data, "--at", "begin", "--interface", "exact"]
    assert "your own check" not in runner.invoke(cli, argv).output
    done = runner.invoke(cli, ["split", "words:Model", "--data", data, "--json"])
    assert '"until": null' in done.output
    for kind, expected in (("text", "└─ "), ("mermaid", "flowchart TD")):
        done = runner.invoke(cli, ["graph", "--format", kind])
        assert done.exit_code == 0, done.output
        assert expected in done.output
        assert "part-2" in done.output


def test_cuts_that_cannot_pay_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the command, in its JSON, and in Python; here no chain is fast enough."""
    monkeypatch.setattr("dni_runtime.split.part._PAYS", float("inf"))
    runner, argv = CliRunner(), ["split", "words:Model", "--at", "first"]
    argv += ["--data", "{dataset: 'words:Words', batch_size: 8}"]
    for more in ([], ["--json"]):
        assert "times as fast as one process" in runner.invoke(cli, [*argv, *more]).output
    Chain.split("words:Model", data=SETTINGS["data"], at=["first"], returns=0)
    assert "times as fast as one process" in caplog.text


def test_what_forbids_more_cuts_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = property(lambda program: "not after here: that is changed in place later")
    monkeypatch.setattr("dni_runtime.network.program.Program.obstacles", told)
    with pytest.raises(SpecError, match="can be cut in") as caught:
        split_chain("words:Model", Path("chain.yaml"), SETTINGS, modules=40)
    assert caught.value.hint == "not after here: that is changed in place later"


def test_the_settings_of_a_chain_file(folder: Path) -> None:
    given = {"name": "mine", "epochs": 3, "data": {**SETTINGS["data"], "batch_size": 16}}
    Path("given.yaml").write_text(yaml.safe_dump(given))
    runner, argv = CliRunner(), ["split", "words:Model", "--at", "first"]
    done = runner.invoke(cli, [*argv, "--settings", "given.yaml"])
    assert done.exit_code == 0, done.output
    found = yaml.safe_load(Path("chain.yaml").read_text())
    assert {key: found[key] for key in given} == given
    options = ["--settings", "given.yaml", "--data", "{batch_size: 8}", "--returns", "0"]
    done = runner.invoke(cli, [*argv, *options])
    assert done.exit_code == 0, done.output
    found = yaml.safe_load(Path("chain.yaml").read_text())
    assert found["data"] == SETTINGS["data"]
    assert found["network"]["returns"] == "0"
    done = runner.invoke(cli, argv)
    assert isinstance(done.exception, UsageError)
    assert "no data is named" in str(done.exception)


def test_what_is_frozen_has_no_interface_and_no_gradient(folder: Path) -> None:
    Path("still.py").write_text(DEEP)
    data = {"dataset": "digits", "flatten": True}
    chain = Chain.split("still:build", data=data, at=["a", "b"], freeze=["a", "b.bias"])
    text = Path("chain.yaml").read_text()
    assert yaml.safe_load(text)["defaults"]["freeze"] == ["0.network.a.*", "0.network.b.bias"]
    assert chain.prepared.chain.name == "deep"
    names = [part.interface and part.interface.name for part in chain.parts]
    assert (names, chain.parts[0].because) == (["none", "mixed", None], "frozen")
    assert "parameters, frozen\n  - name: part-1" in text
    assert chain.parts[0].interface_s == 0
    assert "none: frozen" in repr(chain.parts)
    trained = Chain.split("still:build", data=data, at=["a", "b"])
    assert trained.parts[0].memory > 2 * chain.parts[0].memory
    with pytest.raises(UsageError, match=r"has no parameters of 'bb' to freeze\n.*'b'"):
        Chain.split("still:build", data=data, freeze=["bb"])
    with pytest.raises(UsageError, match=r"'bias' to freeze\n.*allowed: a\.bias, b\.bias"):
        Chain.split("still:build", data=data, freeze=["bias"])
    sys.modules.pop("still", None)


DEEP = """\
from torch import nn

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 256), nn.Linear(256, 32), nn.Linear(32, 10)

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()).relu())

def build():
    return Deep()
"""


def test_settings_of_modules_go_to_as_many_parts(folder: Path) -> None:
    modules = [
        {"name": "x", "device": "cpu", "layers": []},
        {"name": "y", "resources": {"memory": "1G"}},
    ]
    image = {"requirements": ["numpy==2.0"]}
    settings = {**SETTINGS, "modules": modules, "image": image, "epochs": 3}
    taken = split_chain("words:Model", Path("chain.yaml"), settings, at=["first"])
    found = yaml.safe_load(Path("chain.yaml").read_text())
    assert [one["name"] for one in found["modules"]] == ["part-1", "part-2"]
    assert (found["modules"][0]["device"], found["modules"][1]["resources"]) == (
        "cpu",
        {"memory": "1G"},
    )
    assert (taken.prepared.chain.epochs, found["image"]) == (3, image)
    with pytest.raises(UsageError, match="the 2 modules of the settings have their own 'device'"):
        split_chain("words:Model", Path("chain.yaml"), settings, modules=3)


def test_what_modules_learn_by_and_start_from_is_not_dropped(folder: Path) -> None:
    settings = {**SETTINGS, "modules": [{"name": "x", "interface": "exact"}, {"name": "y"}]}
    (first, _) = split_chain("words:Model", Path("chain.yaml"), settings, at=["first"]).parts
    assert (first.interface and first.interface.name, first.because) == ("exact", "asked")
    again = settings_of(Path("chain.yaml"))  # has an 'init' of its own
    (first, _) = split_chain("words:Model", Path("chain.yaml"), again, at=["first"]).parts
    assert first.because == "asked"
    (first, _) = split_chain(
        "words:Model", Path("chain.yaml"), again, at=["first"], interface="delayed"
    ).parts
    assert first.interface is not None
    assert first.interface.name == "delayed"
    with pytest.raises(UsageError, match="modules of the settings have their own 'interface'"):
        split_chain("words:Model", Path("chain.yaml"), settings, modules=3)
    given = {**SETTINGS, "defaults": {"init": {"file": "weights.safetensors"}}}
    with pytest.raises(UsageError, match=r"'defaults.init' of the settings .*\n.*--weights"):
        split_chain("words:Model", Path("chain.yaml"), given, at=["first"])


COUNTED = """
import threading
from pathlib import Path

import words


def build(locked=False):
    with Path("calls").open("a") as file:
        file.write("+")
    network = words.Model()
    if locked:
        network.lock = threading.Lock()
    return network
"""


@pytest.mark.parametrize(("locked", "most"), [(False, 3), (True, 100)], ids=["plain", "no copies"])
def test_how_often_the_network_is_built(folder: Path, *, locked: bool, most: int) -> None:
    """By the function itself, by tracing, and for all parts, checks and tries; not for each."""
    Path("counted.py").write_text(COUNTED)
    calls = Path("calls")
    try:
        taken = split_chain(
            "counted:build", Path("chain.yaml"), SETTINGS, modules=4, args={"locked": locked}
        )
        assert len(taken.parts) == 4
        assert len(calls.read_text()) <= most
        calls.unlink()
        prepare(Path("chain.yaml"))  # which is traced already
        assert locked or len(calls.read_text()) == 1
    finally:
        sys.modules.pop("counted", None)
