"""Reading chain.yaml: what is accepted, and errors that say where."""

import re
import time
from pathlib import Path

import pytest

from dni_runtime.errors import SpecError
from dni_runtime.plan.splitting import settings_of
from dni_runtime.schedulers.slurm.profiles import parse_profile
from dni_runtime.spec import ChainSpec, load_chain, parse_chain, source_files
from dni_runtime.spec.load import parse_yaml

CHAIN = """\
name: mlp
defaults:
  optimizer: {Adam: {lr: 1e-3}}
modules:
  - name: a
    layers:
      - Flatten
      - Linear: {in_features: 64, out_features: 8}
      - Residual: [ReLU, {Sequential: [Identity]}]
  - name: b
    layers: [{import: "mine:Head", args: {width: 8}}]
"""


def test_forms_survive_a_round_trip() -> None:
    chain = parse_chain(CHAIN)
    again = ChainSpec.model_validate(chain.model_dump(mode="json"))
    assert again == chain
    assert chain.modules[0].layers[1].args == {"in_features": 64, "out_features": 8}
    assert [layer.type for layer in chain.modules[0].layers[2].layers] == ["ReLU", "Sequential"]
    assert chain.modules[1].layers[0].type == "mine:Head"


def test_exponents_are_numbers_and_words_stay_words() -> None:
    chain = parse_chain(CHAIN + "infiniband: off\n")
    assert chain.defaults.optimizer is not None
    assert chain.defaults.optimizer.args == {"lr": 0.001}
    assert chain.infiniband == "off"


@pytest.mark.parametrize(
    ("change", "line", "path", "words"),
    [
        (("    layers:\n", "    layer:\n"), 6, "modules[0].layer", ["'layer'", "did you mean"]),
        (("name: a", "name: A/b"), 5, "modules[0].name", ["'A/b'", "lower-case"]),
        (("name: b", "name: a"), 4, "modules", ["both named 'a'"]),
        (("{Sequential: [Identity]}", "{Sequential: 3}"), 9, None, ["Sequential takes a list"]),
        (("[{import: ", "[{Linear: 3}, {import: "), 11, None, ["Linear takes keywords"]),
        (('"mine:Head"', '"mine.Head"'), 11, None, ["'mine.Head'", "package.module:Class"]),
        (("name: mlp", "name: mlp\nname: x"), 2, "name", ["duplicate key 'name'"]),
        (
            ("name: mlp", "name: mlp\nlinks: {window: 0}"),
            2,
            "links.window",
            ["0 is not at least 1"],
        ),
        (
            ("optimizer: {Adam: {lr: 1e-3}}", "clip: 1.0"),
            3,
            "defaults.clip",
            ["1.0 is not a mapping", "allowed: norm, value"],
        ),
        (("name: mlp", "name: mlp\nlinks: {transport: udp}"), 2, None, ["'udp'", "'ipc'"]),
        (("name: mlp", "name: mlp\nlinks: {transport: ipc, port: 5000}"), 2, "links", ["'tcp'"]),
        (
            ("name: mlp", "name: mlp\nrestart: {policy: never, on_stall: restart}"),
            2,
            "restart",
            ["'policy: never'", "choose one"],
        ),
    ],
)
def test_errors_name_line_path_value_and_what_is_allowed(
    change: tuple[str, str], line: int, path: str | None, words: list[str]
) -> None:
    with pytest.raises(SpecError) as caught:
        parse_chain(CHAIN.replace(*change, 1), file="c.yaml")
    assert caught.value.line == line
    assert path is None or caught.value.path == path
    for word in ("c.yaml", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["", "- a\n", "a: [\n", "a: 'x\n", "name: x\n"])
def test_other_documents_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"c\.yaml"):
        parse_chain(text, file="c.yaml")


def test_the_tail_takes_no_interface() -> None:
    with pytest.raises(SpecError, match="has the loss"):
        parse_chain(CHAIN + "    interface: exact\n")


def test_a_missing_file_names_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="dnictl init"):
        load_chain(tmp_path / "none.yaml")


def test_sources_of_user_classes_are_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "table.txt").write_text("")
    chain = parse_chain(CHAIN + "sources: [extra]\n")
    assert sorted(source_files(chain, tmp_path)) == ["extra/table.txt", "mine.py"]
    with pytest.raises(SpecError, match="not a file or folder"):
        source_files(parse_chain(CHAIN + "sources: [../x]\n"), tmp_path)


def test_what_sources_import_is_found(tmp_path: Path) -> None:
    files = {
        "mine.py": "import torch, blocks.conv as conv\nfrom helpers import one",
        "helpers.py": "import mine  # in a circle\ndef one():\n    from later import two",
        "later.py": "no python",
        "unused.py": "",
        "blocks/__init__.py": "",
        "blocks/conv.py": "from . import deep\nfrom .. import unused",
        "blocks/deep.py": "",
        "table/read.py": "import parse",
        "parse.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = source_files(parse_chain(CHAIN + "sources: [table]\n"), tmp_path)
    assert sorted(found) == sorted(set(files) - {"unused.py"})


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
DEEP = "a: &a " + "[" * 60 + "]" * 60 + "\nb: " + "[" * 60 + "*a" + "]" * 60


@pytest.mark.parametrize(
    ("more", "line", "words"),
    [
        (BOMB, 12, "more than 100,000 values"),
        ("a: &a [x]\n? *a\n: 1", 12, "a key is a word"),
        ("a: &a {k: [1]}\nb: &b {<<: *b}\n", 13, "deeper than 100 levels"),
        ("a: &a [*a, *a]\n", 12, "deeper than 100 levels"),
        (DEEP, 12, "deeper than 100 levels, with what aliases stand for"),
        ("a: 1\nb: " + "[" * 20_000, 13, "deeper than 100 levels"),
        ("a: 1\nepochs: " + "9" * 5000, 13, "cannot be read as int: Exceeds the limit"),
        ("a: 1\n? " + "9" * 5000 + "\n: 1", 13, "cannot be read as int: Exceeds the limit"),
        ("a: 1\nepochs: !!int 0x" + "f" * 5000, 13, "cannot be read as int"),
        ("a: 1\nepochs: !!int many", 13, "cannot be read as int"),
        ("a: 1\nepochs: !!bool maybe", 13, "cannot be read as bool"),
        ("a: 1\nepochs: !!timestamp now", 13, "cannot be read as timestamp"),
        ('a: 1\nb: "\\U00110000"', 13, "not in range"),
        ('a: 1\nb: "\\UFFFFFFFF"', 13, "not valid YAML"),
        ("a: 1\nb: \0", 13, "U+0000 is not allowed"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else str(value),
)
def test_documents_of_others_are_bounded(more: str, line: int, words: str) -> None:
    began = time.monotonic()
    with pytest.raises(SpecError, match=re.escape(words)) as caught:
        parse_chain(CHAIN + more, file="theirs.yaml")
    assert time.monotonic() - began < 60
    assert (caught.value.file, caught.value.line) == ("theirs.yaml", line)


def test_values_are_counted_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dni_runtime.spec.load._MAX_NODES", 1000)
    with pytest.raises(SpecError, match=r"theirs.yaml:13: not valid YAML: more than 1,000 values$"):
        parse_yaml("\n" * 11 + "a: [" + "x, " * 900 + "]\nb: [" + "x, " * 200, "theirs.yaml")


def test_aliases_are_allowed() -> None:
    text = CHAIN.replace("layers:\n", "layers: &same\n").partition("    layers: [{")[0]
    chain = parse_chain(text + "    layers: *same\n")
    assert chain.modules[0].layers == chain.modules[1].layers


def test_all_yaml_is_read_by_the_same_rules(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("name: x\n" + BOMB)
    with pytest.raises(SpecError, match=r"theirs.yaml:2: .*more than 100,000 values"):
        settings_of(tmp_path / "theirs.yaml")
    with pytest.raises(SpecError, match=r"theirs.yaml:1: .*more than 100,000 values"):
        parse_profile(BOMB, file="theirs.yaml")
    with pytest.raises(SpecError, match=r"theirs.yaml:2: nonsense: unknown key"):
        parse_profile("\nnonsense: 1\n", file="theirs.yaml")
    (tmp_path / "words.yaml").write_text("infiniband: off\nlr: 1e-3\n")
    assert settings_of(tmp_path / "words.yaml") == {"infiniband": "off", "lr": 0.001}
