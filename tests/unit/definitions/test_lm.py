"""The layers of the template ``lm``, and the program that lets it write."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.resources import as_file, files
from types import ModuleType

import pytest
import torch
from torch import nn

import dni_runtime

VOCABULARY, DIM, CONTEXT = 256, 16, 12


@pytest.fixture
def lm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module ``lm``, found as it is beside a chain file."""
    with as_file(files("dni_runtime.definitions") / "chains" / "lm") as folder:
        monkeypatch.syspath_prepend(str(folder))
        yield import_module("lm")
    for name in ("lm", "generate"):
        sys.modules.pop(name, None)


@pytest.fixture
def model(lm: ModuleType) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        lm.Embed(VOCABULARY, DIM, CONTEXT),
        lm.Block(DIM, 4),
        lm.Block(DIM, 2),
        lm.Head(DIM, VOCABULARY),
    ).eval()


def test_a_prediction_rests_on_the_tokens_before_it(model: nn.Module) -> None:
    x_BT = torch.randint(0, VOCABULARY, (3, CONTEXT))
    scores_BTV = model(x_BT)
    assert scores_BTV.shape == (3, CONTEXT, VOCABULARY)
    for changed in range(CONTEXT):
        y_BT = x_BT.clone()
        y_BT[:, changed] = (y_BT[:, changed] + 1) % VOCABULARY
        same = torch.isclose(model(y_BT), scores_BTV, atol=1e-6).all(2).all(0)
        assert same.tolist() == [place < changed for place in range(CONTEXT)]
    torch.testing.assert_close(model(x_BT[:, :5]), scores_BTV[:, :5])


def test_attention_is_torchs(lm: ModuleType) -> None:
    """Compared with nn.TransformerEncoderLayer, which has the same parts."""
    torch.manual_seed(0)
    block = lm.Block(DIM, 4)
    theirs = nn.TransformerEncoderLayer(
        DIM, 4, 4 * DIM, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    with torch.no_grad():
        theirs.self_attn.in_proj_weight.copy_(block.queries_keys_values.weight)
        theirs.self_attn.in_proj_bias.copy_(block.queries_keys_values.bias)
        theirs.self_attn.out_proj.load_state_dict(block.attention_output.state_dict())
        theirs.norm1.load_state_dict(block.attention_norm.state_dict())
        for mine, other in zip(
            block.layers, (theirs.norm2, theirs.linear1, None, theirs.linear2), strict=True
        ):
            if other is not None:
                other.load_state_dict(mine.state_dict())
    h_BTD = torch.randn(2, CONTEXT, DIM)
    mask_TT = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
    torch.testing.assert_close(block(h_BTD), theirs(h_BTD, src_mask=mask_TT, is_causal=True))


def test_heads_must_fit(lm: ModuleType) -> None:
    with pytest.raises(ValueError, match="dim 16 cannot be shared by 3 heads"):
        lm.Block(16, 3)


def test_it_writes_on_beyond_its_context(model: nn.Module) -> None:
    generate = import_module("generate").generate
    first = bytes(generate(model, b"def ", 2 * CONTEXT, 0.0))
    assert len(first) == 2 * CONTEXT
    text = list(b"def " + first)
    for place in range(4, len(text)):
        scores_V = model(torch.tensor([text[max(place - CONTEXT, 0) : place]]))[0, -1]
        assert text[place] == int(scores_V.argmax())
    torch.manual_seed(1)
    drawn = bytes(generate(model, b"def ", 50, 1.0))
    assert len(set(drawn)) > 20
    torch.manual_seed(1)
    assert bytes(generate(model, b"def ", 50, 1.0)) == drawn
    assert bytes(generate(model, b"def ", 2 * CONTEXT, 1e-6)) == first


def test_the_program(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    program = import_module("generate")

    def write(*arguments: str) -> bytes:
        monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
        program.main()
        sys.stdout.flush()
        return capfdbinary.readouterr().out

    with pytest.raises(SystemExit, match=r"generate\.py: there is no file '.*gone\.safetensors'"):
        write("gone.safetensors")
    monkeypatch.setattr(dni_runtime, "load", lambda path, trust: model)
    text = write("--prompt", "import ", "--bytes", "9", "--seed", "3")
    assert text.startswith(b"import ")
    assert len(text) == len(b"import ") + 9 + 1
    assert write("--prompt", "import ", "--bytes", "9", "--seed", "3") == text
    for wrong in (("--prompt", ""), ("--temperature", "-1")):
        with pytest.raises(SystemExit) as caught:
            write(*wrong)
        assert caught.value.code == 2
