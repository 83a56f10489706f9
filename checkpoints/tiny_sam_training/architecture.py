"""The architecture of `tiny_sam`: SAM 3 in small, 7.0 million parameters."""

from jaxinfer.sam.config import Config, TextConfig, TrunkConfig

VOCAB_SIZE = 667
"""As many tokens as `tokenizer.py` makes."""

CONFIG = Config(
    # 24 x 24 patches in nine windows; a picture is the side at which the full-size model learnt
    # its position table, and every sixth of the depth sees as much as there.
    trunk=TrunkConfig(
        hidden_size=192,
        intermediate_size=768,
        num_layers=6,
        num_heads=6,
        image_size=336,
        patch_size=14,
        window=8,
        global_layers=(2, 5),
        table=8,
    ),
    text=TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=512,
        num_layers=2,
        num_heads=4,
        context=32,
    ),
    width=128,
    num_heads=4,
    intermediate_size=256,
    geometry_layers=1,
    encoder_layers=3,
    decoder_layers=3,
    num_queries=16,
)
