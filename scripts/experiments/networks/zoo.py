"""Sixty networks that people use, in small configurations with random weights, by name.

Nothing is downloaded. Whatever draws in train mode (dropout, stochastic depth) is turned off,
because a whole network and its parts draw other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from networks import own, vision

IMAGE, TEXT, MASK = "float32[3, 64, 64]", "int64[16] < 100", "mask[16]"
SMALL_IMAGE = "float32[3, 32, 32]"
CLASS, NEXT = "int64[] < 10", "int64[16] < 100"

Row = tuple[Callable[[], nn.Module], list[str], str, dict[str, Any]]


def _transformer(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return made

    return build


def _encoder(name: str, also: Mapping[str, Any] = {}, kind: str = "SequenceClassification") -> Row:
    """Classify sentences with a mask of their padding."""
    options = {
        "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 64, "max_position_embeddings": 32, "num_labels": 10,
    }  # fmt: skip
    build = _transformer(f"{name}For{kind}", f"{name}Config", **{**options, **also})
    return (
        build,
        [TEXT, MASK],
        CLASS,
        {"takes": ["input_ids", "attention_mask"], "returns": "logits"},
    )


def _decoder(model: str, config: str, **options: Any) -> Row:
    """Predict the next token."""
    usual = {
        "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 64, "max_position_embeddings": 32, "use_cache": False,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    build = _transformer(model, config, **{**usual, **options})
    return build, [TEXT], NEXT, {"takes": ["input_ids"], "returns": "logits"}


def _translator(model: str, config: str, **options: Any) -> Row:
    """Predict the next token of a text from it and from another text."""
    usual = {"vocab_size": 100, "d_model": 32, "use_cache": False, "pad_token_id": 0,
             "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}  # fmt: skip
    build = _transformer(model, config, **{**usual, **options})
    return (
        build,
        [TEXT, TEXT],
        NEXT,
        {"takes": ["input_ids", "decoder_input_ids"], "returns": "logits"},
    )


_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 10,
}
_PYRAMID = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [1, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": 10,
}
_CLIP = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def _pictures(model: str, config: str, **options: Any) -> Row:
    build = _transformer(model, config, **options)
    return build, [SMALL_IMAGE], CLASS, {"takes": ["pixel_values"], "returns": "logits"}


def _timm(name: str, image: str = IMAGE, **options: Any) -> Row:
    def build() -> nn.Module:
        import timm

        made: nn.Module = timm.create_model(name, pretrained=False, num_classes=10, **options)
        return made

    return build, [image], CLASS, {}


def _small(build: Callable[[], nn.Module]) -> Row:
    return build, [IMAGE], CLASS, {}


def _torchvision(name: str, image: str = IMAGE, label: str = CLASS, **options: Any) -> Row:
    given = {key: options.pop(key) for key in ("returns",) if key in options}
    options = {"weights": None, "num_classes": 10, **options}
    if "segmentation" in name:
        options["weights_backbone"] = None
    places = {"segmentation.": vision.models.segmentation, "video.": vision.models.video}
    return (
        lambda: next(
            (
                getattr(place, name.removeprefix(start))
                for start, place in places.items()
                if name.startswith(start)
            ),
            getattr(vision.models, name, None),
        )(**options),
        [image], label, given,
    )  # fmt: skip


TRANSFORMERS: dict[str, Row] = {
    "bert": _encoder("Bert"),
    "distilbert": _encoder(
        "DistilBert", {"dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 64}
    ),
    "roberta": _encoder("Roberta", {"pad_token_id": 0}),
    "electra": _encoder("Electra", {"embedding_size": 32}),
    "deberta-v2": _encoder(
        "DebertaV2",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "pooler_hidden_size": 32},
    ),
    "albert": _encoder("Albert", {"embedding_size": 16}),
    "gpt2": _decoder(
        "GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=4, n_head=4, n_positions=32
    ),
    "opt": _decoder("OPTForCausalLM", "OPTConfig", ffn_dim=64, word_embed_proj_dim=32),
    "bloom": _decoder("BloomForCausalLM", "BloomConfig", n_layer=4, n_head=4),
    "gpt-neox": _decoder("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "llama": _decoder("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2),
    "mistral": _decoder(
        "MistralForCausalLM", "MistralConfig", num_key_value_heads=2, sliding_window=8
    ),
    "qwen2": _decoder("Qwen2ForCausalLM", "Qwen2Config", num_key_value_heads=2),
    "gemma": _decoder("GemmaForCausalLM", "GemmaConfig", num_key_value_heads=2, head_dim=8),
    "mixtral": _decoder(
        "MixtralForCausalLM", "MixtralConfig", num_key_value_heads=2, num_local_experts=4
    ),
    "mamba": _decoder("MambaForCausalLM", "MambaConfig", state_size=8, time_step_rank=4),
    "t5": _translator(
        "T5ForConditionalGeneration", "T5Config", d_kv=8, d_ff=64, num_layers=2, num_heads=4
    ),
    "bart": _translator(
        "BartForConditionalGeneration",
        "BartConfig",
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=32,
    ),
    "wav2vec2": (
        _transformer(
            "Wav2Vec2ForSequenceClassification",
            "Wav2Vec2Config",
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=64,
            conv_dim=(16, 16, 16),
            conv_stride=(5, 2, 2),
            conv_kernel=(10, 3, 3),
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            classifier_proj_size=16,
            num_labels=10,
            apply_spec_augment=False,
            layerdrop=0.0,
        ),
        ["float32[800]"],
        CLASS,
        {"takes": ["input_values"], "returns": "logits"},
    ),
    "whisper-encoder": (
        own.whisper_encoder,
        ["float32[16, 64]"],
        "float32[32, 32]",
        {"returns": "last_hidden_state", "loss": "MSELoss"},
    ),
    "clip-vision": (
        _transformer(
            "CLIPVisionModelWithProjection",
            "CLIPVisionConfig",
            **_CLIP,
            image_size=32,
            patch_size=8,
            projection_dim=16,
        ),
        [SMALL_IMAGE],
        "float32[16]",
        {"takes": ["pixel_values"], "returns": "image_embeds", "loss": "MSELoss"},
    ),
    "clip-text": (
        _transformer(
            "CLIPTextModelWithProjection",
            "CLIPTextConfig",
            **_CLIP,
            vocab_size=100,
            max_position_embeddings=16,
            projection_dim=16,
            eos_token_id=99,
            bos_token_id=98,
            pad_token_id=0,
        ),
        [TEXT, MASK],
        "float32[16]",
        {"takes": ["input_ids", "attention_mask"], "returns": "text_embeds", "loss": "MSELoss"},
    ),
    "vit": _pictures("ViTForImageClassification", "ViTConfig", **_VIT),
    "swin": _pictures("SwinForImageClassification", "SwinConfig", **_PYRAMID),
    "segformer": (
        _transformer(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            depths=[1, 1, 1, 1],
            hidden_sizes=[8, 16, 24, 32],
            decoder_hidden_size=32,
            num_labels=5,
        ),
        [IMAGE],
        "int64[16, 16] < 5",
        {"takes": ["pixel_values"], "returns": "logits"},
    ),
}

TIMM: dict[str, Row] = {
    f"timm-{name}": _timm(name, image, **options)
    for name, image, options in (
        ("efficientnet_b0", IMAGE, {}),
        ("mobilenetv3_small_100", IMAGE, {}),
        ("convnext_atto", IMAGE, {}),
        ("vit_tiny_patch16_224", IMAGE, {"img_size": 64, "depth": 4}),
        ("deit3_small_patch16_224", IMAGE, {"img_size": 64, "depth": 3}),
        (
            "swin_tiny_patch4_window7_224",
            IMAGE,
            {"img_size": 64, "window_size": 4, "depths": (1, 1, 2, 1), "embed_dim": 24},
        ),
        ("mixer_s32_224", IMAGE, {"img_size": 64}),
        ("resmlp_12_224", IMAGE, {"img_size": 64}),
        ("regnetx_002", IMAGE, {}),
        ("edgenext_xx_small", IMAGE, {}),
        ("poolformer_s12", IMAGE, {}),
        ("cait_xxs24_224", IMAGE, {"img_size": 64, "depth": 3}),
        ("xcit_nano_12_p16_224", IMAGE, {"img_size": 64, "depth": 3}),
        ("levit_128s", "float32[3, 224, 224]", {}),
        ("ghostnet_050", IMAGE, {}),
        ("repvgg_a0", IMAGE, {}),
    )
} | {
    "timm-densenet": _small(own.dense_net),
    "timm-resnext": _small(own.res_next),
    "timm-res2net": _small(own.res2_net),
    "timm-eca-resnet": _small(own.eca_net),
}

TORCHVISION: dict[str, Row] = {
    "resnet18": _torchvision("resnet18", SMALL_IMAGE),
    "resnet50": _torchvision("resnet50", SMALL_IMAGE),
    "squeezenet": _torchvision("squeezenet1_0"),
    "mobilenet_v2": _torchvision("mobilenet_v2"),
    "shufflenet_v2": _torchvision("shufflenet_v2_x0_5"),
    "googlenet": _torchvision("googlenet", aux_logits=True, init_weights=False, returns="logits"),
    "deeplabv3": _torchvision(
        "segmentation.deeplabv3_mobilenet_v3_large", label="int64[64, 64] < 10", returns="out"
    ),
    "lraspp": _torchvision(
        "segmentation.lraspp_mobilenet_v3_large", label="int64[64, 64] < 10", returns="out"
    ),
    "r3d_18": _torchvision("video.r3d_18", "float32[3, 4, 32, 32]"),
    "mc3_18": _torchvision("video.mc3_18", "float32[3, 4, 32, 32]"),
}

OWN: dict[str, Row] = {
    "siamese": (own.Siamese, [SMALL_IMAGE, SMALL_IMAGE], "float32[1]", {"loss": "MSELoss"}),
    "graph": (own.GraphNetwork, ["float32[12, 8]", "float32[12, 12]"], CLASS, {}),
    "u-net": (own.UNet, [SMALL_IMAGE], "float32[1, 32, 32]", {"loss": "MSELoss"}),
    "seq2seq-lstm": (own.SequenceToSequence, [TEXT, TEXT], NEXT, {}),
    "autoencoder": (
        own.Autoencoder,
        ["float32[20]"],
        "float32[20]",
        {"loss": "MSELoss", "returns": "0"},
    ),
    "two-tower": (
        own.TwoTowers,
        ["int64[] < 100", "int64[5] < 100"],
        "share[1]",
        {"loss": "BCEWithLogitsLoss"},
    ),
    "codebook": (own.CodebookAutoencoder, ["float32[20]"], "float32[20]", {"loss": "MSELoss"}),
    "perceiver": (own.Perceiver, ["float32[16, 8]"], CLASS, {}),
    "spectral": (own.SpectralCritic, [SMALL_IMAGE], "float32[1]", {"loss": "MSELoss"}),
    "experts": (own.SoftExperts, ["float32[20]"], CLASS, {}),
}

NETWORKS: dict[str, Row] = {**TRANSFORMERS, **TIMM, **TORCHVISION, **OWN}


def build(name: str) -> nn.Module:
    """Return a network of the zoo, with weights that its name determines."""
    torch.manual_seed(sum(map(ord, name)))
    network = NETWORKS[name][0]()
    for module in network.modules():
        for key in ("p", "drop_prob", "drop_rate", "dropout", "attention_dropout"):
            if isinstance(getattr(module, key, None), float):
                setattr(module, key, 0.0)
    return network
