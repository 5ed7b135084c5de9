"""transformers' BERT with random weights (Devlin et al. 2019, arXiv:1810.04805), of four layers."""

from torch import nn

from networks import vision  # noqa: F401  transformers imports torchvision


def build() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=100,
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=16,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
