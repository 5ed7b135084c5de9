"""Shape inference and the errors that come before anything starts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dni_runtime.core.chain import LocalChain
from dni_runtime.errors import SpecError
from dni_runtime.resolve.resolve import parameter_counts, resolved_chain, worker_specs
from dni_runtime.resolve.schema import json_schema
from dni_runtime.spec import Choice, DataInfo, LinksSpec, parse_chain
from tests.specs import float32, int64, refused, specs_of, varying

INFO = DataInfo(sample=float32(1, 8, 8), label=int64(), classes=10)
CHAIN = """\
name: net
loss: CrossEntropyLoss
metrics: [accuracy]
modules:
  - name: a
    layers:
      - Conv2d: {in_channels: 1, out_channels: 4, kernel_size: 3, padding: 1}
      - Residual: [{Conv2d: {in_channels: 4, out_channels: 4, kernel_size: 1}}, ReLU]
    interface: mixed
  - name: b
    layers:
      - Flatten
      - Linear: {in_features: 256, out_features: 16}
  - name: c
    layers: [{Linear: {in_features: 16, out_features: 10}}]
    optimizer: {SGD: {lr: 0.1}}
"""


def test_contracts_of_neighbours_agree() -> None:
    a, b, c = specs_of(CHAIN, INFO)
    assert (a.inputs[0].shape, a.output.shape, b.output.shape) == ((1, 8, 8), (4, 8, 8), (16,))
    assert a.output == b.inputs[0]
    assert (a.sources, a.targets, b.targets, c.targets) == ((), b.sources, c.sources, ())
    assert a.link_hash(*a.targets) == b.link_hash(*b.sources)
    assert a.link_hash(*a.targets) != b.link_hash(*b.targets)
    assert (a.gradients_in, b.gradients_in) == (1, 1)
    assert a.head is not None
    assert c.tail is not None
    assert c.interface is None
    assert parameter_counts((a, b, c)) == {"a": 60, "b": 4112, "c": 170}


def test_an_update_of_more_batches_than_the_run_has_is_refused() -> None:
    info = INFO.model_copy(update={"train_samples": 320})  # ten batches
    data = "data: {dataset: digits, batch_size: 32}"
    text = CHAIN.replace("name: net", f"name: net\nepochs: 2\n{data}")
    assert specs_of(text + "    accumulate: 20\n", info)
    message = "one takes 21 batches, and the whole run gives 'c' 20"
    refused(text + "    accumulate: 21\n", info, message, ("modules", 2, "accumulate"))


def test_no_gradients_go_where_nothing_is_trained() -> None:
    """A frozen head wants none; a frozen module after one that is trained passes them on."""
    text = CHAIN.replace("interface: mixed", "freeze: true").replace(
        "  - name: c", "    freeze: true\n  - name: c"
    )
    a, b, c = specs_of(text, INFO)
    assert [one.interface and one.interface.name for one in (a, b, c)] == ["none", "none", None]
    assert [one.gradients_in for one in (a, b, c)] == [0, 0, 0]
    assert [edge.gradients for edge in (*b.sources, *c.sources)] == [0, 0]
    a, b, _ = specs_of(text.replace("freeze: true", "interface: exact", 1), INFO)
    assert [one.interface and one.interface.name for one in (a, b)] == ["exact", "mixed"]
    early = text.replace("freeze: true", "freeze: true\n    interface: local", 1)
    a, b, _ = specs_of(early, INFO)
    assert [one.interface and one.interface.name for one in (a, b)] == ["local", "none"]

    workers = specs_of(text, INFO)
    chain = LocalChain(workers)
    before = [{k: v.clone() for k, v in one.layers.state_dict().items()} for one in chain.steps]
    x = torch.randn(8, 1, 8, 8)
    for _ in range(3):
        chain.train_batch(x, torch.arange(8))
    for number, (was, step) in enumerate(zip(before, chain.steps, strict=True)):
        same = all(torch.equal(was[key], now) for key, now in step.layers.state_dict().items())
        assert same == (number < 2)


@pytest.mark.parametrize(
    ("interface", "first_beta"),
    [("delayed", 0.0), ("{delayed: {max_late: 1}}", None), ("corrected", None), ("exact", None)],
)
def test_optimizers_of_gradients_that_may_be_any_number_of_updates_late(
    interface: str, first_beta: float | None
) -> None:
    text = CHAIN.replace("    interface: mixed\n", "")
    chain = parse_chain(f"defaults: {{interface: {interface}}}\n{text}")
    a, b, c = resolved_chain(chain, INFO).modules
    for module in (a, b):
        assert module.optimizer is not None
        assert module.optimizer.args.get("betas", [None])[0] == first_beta
    assert c.optimizer == Choice(name="SGD", args={"lr": 0.1})


def test_how_late_gradients_may_be() -> None:
    def late(interface: str) -> list[int]:
        text = CHAIN.replace("    interface: mixed\n", "")
        chain = parse_chain(f"defaults: {{interface: {interface}}}\n{text}")
        return [worker.late for worker in worker_specs(chain, INFO)]

    window = LinksSpec().window
    for interface in ("synthetic", "delayed", "exact"):
        assert late(interface) == [2 * window, window, 0], "true gradients come link by link"
    for interface in ("mixed", "{synthetic: {bootstrapped: true}}"):
        assert late(interface) == [window, window, 0]


def test_what_modules_send_up() -> None:
    def sent(*interfaces: str) -> list[tuple[int, bool, bool]]:
        a, b = interfaces
        text = CHAIN.replace("interface: mixed", f"interface: {a}")
        chain = parse_chain(text.replace("- name: b\n", f"- name: b\n    interface: {b}\n"))
        specs = worker_specs(chain, INFO)
        links = [worker.sources[0] for worker in specs[1:]]
        assert [one.gradients for one in links] == [one.gradients_in for one in specs[:-1]]
        return [(one.gradients, one.bootstrapped, one.awaited) for one in links]

    bootstrapped = "{synthetic: {bootstrapped: true}}"
    assert sent("synthetic", "synthetic") == [(1, False, False)] * 2
    assert sent("mixed", "mixed") == [(1, True, False), (1, False, False)]
    assert sent("delayed", "mixed") == [(1, False, True)] * 2, "true ones pass any interface"
    assert sent("delayed", "none") == [(1, False, True)] * 2
    assert sent("local", "delayed") == [(0, False, False), (1, False, True)]
    assert sent(bootstrapped, "synthetic") == [(1, True, False), (1, False, False)]
    assert sent(bootstrapped, "local") == [(1, True, False), (0, False, False)]
    assert sent(bootstrapped, "exact")[0] == (1, False, False), "it has no signal of its own"
    every = "{synthetic: {learn_every: %d}}"
    assert sent(every % 6, every % 4) == [(6, False, False), (2, False, False)]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [("4", "8", "different numbers of micro-batches: 4, 8"), ("128", "128", "two samples")],
)
def test_micro_batches_are_the_whole_chains(first: str, second: str, message: str) -> None:
    text = CHAIN.replace("interface: mixed", f"interface: {{exact: {{micro_batches: {first}}}}}")
    text = text.replace(
        "- name: b\n", f"- name: b\n    interface: {{delayed: {{micro_batches: {second}}}}}\n"
    )
    error = refused(text, INFO, message)
    assert error.location[0] == "modules"


def test_gradients_of_all_parts_come_again() -> None:
    """Batches are cut for the whole chain, for modules that do not ask for it, too."""
    text = CHAIN.replace("interface: mixed", "interface: exact")
    text = text.replace("- name: b\n", "- name: b\n    interface: {exact: {micro_batches: 4}}\n")
    assert [one.resend for worker in specs_of(text, INFO) for one in worker.sources] == [4, 4]


def test_no_module_with_a_state_gets_parts() -> None:
    """Whichever module asks for them: the tail has no interface that could."""
    text = """\
name: x
modules:
  - name: a
    interface: {exact: {micro_batches: 2}}
    layers: [{Linear: {in_features: 6, out_features: 6}}]
  - name: b
    layers: [{Recurrent: {cell: GRU, input_size: 6, hidden_size: 10}}, Flatten]
"""
    info = INFO.model_copy(update={"sample": float32(1, 6)})
    specs_of(text.replace("micro_batches: 2", ""), info)
    refused(text, info, "module 'b' has a recurrent layer; remove 'micro_b")


def test_one_changed_layer_changes_one_hash() -> None:
    before = specs_of(CHAIN, INFO)
    after = specs_of(CHAIN.replace("- Flatten", "- Flatten\n      - Tanh"), INFO)
    assert [x.hash == y.hash for x, y in zip(before, after, strict=True)] == [True, False, True]


def test_host_settings_change_no_hash() -> None:
    other = CHAIN + "data: {path: /elsewhere}\nlinks: {window: 3}\nstop_grace_s: 5\n"
    other += "checkpoint: {keep: 9, every_steps: 7}\nepochs: 9\nsteps: 7\n"
    before, after = specs_of(CHAIN, INFO), specs_of(other, INFO)
    assert [w.hash for w in before] == [w.hash for w in after]


def test_resolved_chain_says_everything_and_resolves_to_itself() -> None:
    full = resolved_chain(parse_chain(CHAIN), INFO)
    assert full.modules[0].interface is not None
    assert full.modules[0].interface.args["local_weight"] == 0.5
    assert full.modules[1].optimizer is not None
    assert full.modules[1].optimizer.name == "Adam"
    assert full.modules[2].interface is None
    assert resolved_chain(full, INFO) == full


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        (("Flatten", "Flaten"), "modules[1].layers[0]", ["'Flaten'", "did you mean 'Flatten'"]),
        (
            ("out_features: 16", "out_feature: 16"),
            "modules[1].layers[1].Linear.out_feature",
            ["did you mean 'out_features'"],
        ),
        (
            ("{in_features: 16", "{in_features: 32"),
            "modules[2].layers[0].Linear",
            ["the previous module sends float32[B x 16]"],
        ),
        (
            ("{Conv2d: {in_channels: 4", "{Conv2d: {in_channels: 5"),
            "modules[0].layers[1].Residual.layers[0].Conv2d",
            ["'in_channels': 5", "it gets float32[B x 4 x 8 x 8]"],
        ),
        (("out_features: 10", "out_features: 3"), "modules[2].layers", ["10 classes"]),
        (("interface: mixed", "interface: mixd"), "modules[0].interface", ["'mixed'"]),
        (("interface: mixed", "interface: {mixed: {local_weigth: 1}}"), None, ["'local_weight'"]),
        (
            ("interface: mixed", "interface: {synthetic: {synthesizer: mlpp}}"),
            "modules[0].interface.synthetic.synthesizer",
            ["'mlp'"],
        ),
        (
            (
                "interface: mixed",
                "interface: {synthetic: {conditioned: false, synthesizer: classifier}}",
            ),
            None,
            ["class labels"],
        ),
        (("{SGD: {lr: 0.1}}", "{SDG: {lr: 0.1}}"), "modules[2].optimizer", ["'SGD'"]),
        (("{SGD: {lr: 0.1}}", "{SGD: {lr: -1}}"), "modules[2].optimizer.SGD", ["-1"]),
        (("CrossEntropyLoss", "CrossEntropy"), "loss", ["'CrossEntropyLoss'"]),
        (("CrossEntropyLoss", "MSELoss"), "loss", ["int64"]),
        (("[accuracy]", "[acuracy]"), "metrics[0]", ["'accuracy'"]),
        (("out_features: 16}", "bias: true}"), "modules[1].layers[1].Linear", ["'out_features'"]),
        (("- Flatten", "- import: nowhere:Layer"), "modules[1].layers[0]", ["'nowhere'"]),
        (("- Flatten", "- import: json:JSONDecoder"), "modules[1].layers[0]", ["not a Module"]),
        (
            ("{Linear: {in_features: 16, out_features: 10}}", f"{{import: '{__name__}:Argmax'}}"),
            None,
            ["the output is int64"],
        ),
        (
            ("interface: mixed", "interface: {corrected: {local: {optimizer: LBFGS}}}"),
            "modules[0].interface.corrected.local.optimizer.LBFGS",
            [],
        ),
    ],
)
def test_errors_say_where_and_what_is_allowed(
    change: tuple[str, str], path: str | None, words: list[str]
) -> None:
    with pytest.raises(SpecError) as caught:
        specs_of(CHAIN.replace(*change, 1), INFO)
    assert path is None or caught.value.path == path
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("layers", "fits"),
    [
        ("{BatchNorm2d: {num_features: 1}}, Flatten", True),
        ("Flatten, {BatchNorm1d: {num_features: 64}}", False),
        ("Flatten, {Residual: [{BatchNorm1d: {num_features: 64}}]}", False),
    ],
)
def test_batches_of_one_sample(layers: str, fits: bool) -> None:
    """BatchNorm needs several values for each channel; a map has them."""
    text = f"""\
name: x
data: {{batch_size: 1}}
defaults: {{interface: %s}}
modules:
  - {{name: a, layers: [{layers}]}}
  - {{name: b, layers: [{{Linear: {{in_features: 64, out_features: 10}}}}]}}
"""
    if not fits:
        refused(
            text % "mixed", INFO, "needs batches of more than one sample", "modules[0].layers[1]"
        )
        return
    for interface in ("mixed", "{local: {hidden: 4}}", "{local: {head: mlp-sr}}"):
        chain = LocalChain(specs_of(text % interface, INFO))
        for x in torch.randn(3, 1, 1, 8, 8):
            assert math.isfinite(chain.train_batch(x, torch.tensor([3])))


class Argmax(nn.Module):
    """A prediction without gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


def test_sparse_gradients_are_not_clipped() -> None:
    text = """\
name: x
defaults: {clip: {norm: 1.0}, optimizer: {SGD: {lr: 0.1}}}
modules:
  - name: a
    layers:
      - Embedding: {num_embeddings: 4, embedding_dim: 2, sparse: true}
      - Flatten
      - Linear: {in_features: 6, out_features: 10}
"""
    info = INFO.model_copy(update={"sample": int64(3)})
    refused(text, info, "sparse gradients cannot be clipped", "defaults.clip")


@pytest.mark.parametrize(
    ("settings", "path", "words"),
    [
        ("schedule: {StepLR: {step_size: 0}}", "schedule.StepLR", "StepLR fails with"),
        ("schedule: {CosineAnnealingLR: {T_max: 0}}", "schedule.CosineAnnealingLR", "modulo by"),
        ("schedule: {ExponentialLR: {gamma: x}}", "schedule.ExponentialLR.gamma", "not 'x'"),
        (
            "groups: [{parameters: biases, options: {lr: -1}}]",
            "groups[0].options.Adam",
            "Invalid learning rate: -1",
        ),
        ("groups: [{parameters: biases, options: {lr: x}}]", "groups[0].options.Adam.lr", "'x'"),
    ],
)
def test_values_of_schedules_and_groups(settings: str, path: str, words: str) -> None:
    refused(f"defaults: {{{settings}}}\n{CHAIN}", INFO, words, f"defaults.{path}")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("loss", "{CrossEntropyLoss: {weight: [a, b]}}", "CrossEntropyLoss refuses"),
        ("metrics", "[ROUGEScore]", "ROUGEScore refuses"),  # it needs nltk
    ],
)
def test_values_of_losses_and_metrics(key: str, value: str, words: str) -> None:
    given = {"loss": "CrossEntropyLoss", "metrics": "[accuracy]"}[key]
    refused(CHAIN.replace(f"{key}: {given}", f"{key}: {value}"), INFO, words)


def test_lazy_layers_are_counted() -> None:
    text = CHAIN.replace("Linear: {in_features: 256, ", "LazyLinear: {")
    assert parameter_counts(specs_of(text, INFO)) == {"a": 60, "b": 4112, "c": 170}


@pytest.mark.parametrize("field", ["dtype", "gradient_dtype"])
def test_one_scale_per_channel_needs_channels(field: str) -> None:
    layers = "[Flatten, {Linear: {in_features: 256, out_features: 1}}, {Flatten: {start_dim: 0}}]"
    chain = f"""\
name: scalars
links: {{{field}: int8-channel}}
loss: MSELoss
metrics: [mse]
modules:
  - {{name: a, layers: {layers}, interface: exact}}
  - {{name: b, layers: [Identity]}}
"""
    info = DataInfo(sample=float32(256), label=float32())
    refused(chain, info, "module 'a' is float32\\[B\\]", f"links.{field}")
    specs_of(chain.replace("int8-channel", "int8"), info)


def test_integers_are_not_quantized() -> None:
    chain = """\
name: tokens
links: {dtype: int8}
modules:
  - {name: a, layers: [Identity]}
  - name: b
    layers: [{Embedding: {num_embeddings: 4, embedding_dim: 10}}]
"""
    info = DataInfo(sample=int64(), label=int64(), classes=10)
    refused(chain, info, r"output is int64\[B\], which has no gradient", "modules[0].layers")


def test_schema_lists_the_names() -> None:
    schema = json_schema()
    assert "Linear" in schema["$defs"]["LayerSpec"]["anyOf"][0]["enum"]
    assert "'tail'" in str(schema["$defs"]["DataSpec"]["properties"]["labels"])
    assert "mixed" in str(schema["$defs"]["ModuleSpec"]["properties"]["interface"])


def test_who_waits_for_gradients_cannot_continue_alone() -> None:
    text = CHAIN.replace("interface: mixed", "interface: exact")
    exact = [worker.exact for worker in specs_of(text, INFO)]
    assert exact == [True, False, False]
    refused(
        text + "links: {on_loss: continue}\n",
        INFO,
        "module 'a' is trained by true gradients alone",
        ("links", "on_loss"),
    )
    specs_of(CHAIN + "links: {on_loss: continue}\n", INFO)


@pytest.mark.parametrize("field", ["replay: 8", "synthetic_inputs: late"])
def test_no_batch_comes_between_the_parts_of_another(field: str) -> None:
    text = CHAIN.replace("interface: mixed", "interface: {exact: {micro_batches: 2}}")
    specs_of(text, INFO)
    refused(
        f"{text}links: {{{field}}}\n",
        INFO,
        "between the micro-batches",
        ("links", field.split(":")[0]),
    )


def test_what_is_kept_for_neighbours_that_restart() -> None:
    chain = parse_chain(CHAIN + "links: {window: 5}\n")
    assert [worker.retain for worker in worker_specs(chain, INFO)] == [5, 0, 0]
    chain = parse_chain(CHAIN + "restart: {policy: never}\n")
    assert [(one.retain, one.snapshot_s) for one in worker_specs(chain, INFO)] == [(0, 0)] * 3


TEXTS = DataInfo(sample=varying(int64(8)), label=int64(), classes=3)
READER = """\
name: reader
data: {dataset: 'texts:Texts', max_length: 8}
modules:
- {name: a, layers: [{Embedding: {num_embeddings: 9, embedding_dim: 4}}]}
- {name: b, layers: [{Linear: {in_features: 4, out_features: 6}}, ReLU]}
- {name: c, layers: [{AdaptiveAvgPool2d: {output_size: [1, 6]}}, Flatten,
    {Linear: {in_features: 6, out_features: 3}}]}
"""


class Even(nn.Module):
    """Returns two texts, of which one has an even length."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[:, : x.shape[1] // 2 * 2]


class Means(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a.mean(1, keepdim=True) + b.mean(1, keepdim=True)


def test_outputs_of_different_lengths_are_refused() -> None:
    """As large as each other for the longest samples alone."""
    text = (
        READER.replace(", ReLU]}", f", {{import: '{__name__}:Even'}}]}}")
        .replace("- {name: c,", "- {name: c, inputs: [b.0, b.1],")
        .replace("layers: [{Adaptive", f"layers: [{{import: '{__name__}:Means'}}, {{Adaptive")
    )
    message = r"float32\[B x <=5 x 6\] and float32\[B x <=4 x 6\] cannot travel in one row"
    refused(text, TEXTS, message, ("data", "max_length"))


def test_samples_with_a_length_of_their_own() -> None:
    a, b, c = specs_of(READER, TEXTS)
    shown = ["float32[B x <=8 x 4]", "float32[B x <=8 x 6]", "float32[B x 3]"]
    assert [str(one.output) for one in (a, b, c)] == shown
    assert [one.interface and one.interface.name for one in (a, b)] == ["delayed", "delayed"]
    fixed = DataInfo(sample=int64(8), label=int64(), classes=3)
    d, e, _ = specs_of(READER, fixed)
    assert [one.interface and one.interface.name for one in (d, e)] == ["mixed", "mixed"]
    assert a.link_hash(*a.targets) != d.link_hash(*d.targets)
    for interface in ("mixed", "local", "synthetic"):
        message = f"the gradient interface '{interface}' of module 'a' has parts of the activation"
        text = READER + f"defaults: {{interface: {interface}}}\n"
        refused(text, TEXTS, message, ("defaults", "interface"))
    flat = READER.replace("{AdaptiveAvgPool2d: {output_size: [1, 6]}}", "ReLU")
    flat = flat.replace("in_features: 6, out_features: 3", "in_features: 48, out_features: 3")
    assert specs_of(flat, fixed)
    message = r"lets a batch be shorter, as int64\[B x 5\]: Linear.* gets float32\[B x 30\]"
    refused(flat, TEXTS, message)
    predicted = READER + "links: {synthetic_inputs: gone}\ndefaults: {interface: exact}\n"
    refused(predicted, TEXTS, "predicted inputs have one length", ("links", "synthetic_inputs"))
