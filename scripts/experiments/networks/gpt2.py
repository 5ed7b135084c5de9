"""transformers' GPT-2 with random weights (Radford et al. 2019), of four layers."""

from torch import nn

from networks import vision  # noqa: F401  transformers imports torchvision


def build(tied: bool = True) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=100,
            n_layer=4,
            n_embd=64,
            n_head=4,
            n_positions=16,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=tied,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
