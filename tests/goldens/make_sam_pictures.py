"""Makes `sam_pictures.npz`: what torchvision and torch make of pictures and of mask logits.

    python make_sam_pictures.py

With torch 2.13.0 (CPU), torchvision 0.28.0 and numpy. `picture_i` `[H, W, 3]` and `resized_i`
`[S, S, 3]` are uint8, resized as Meta's image processor does it. `logits` `[n, n]` are resized to
the shapes of `mask_i`, which says where they are above 0.
"""

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import interpolate
from torchvision.transforms import v2

SIZE = 28
PICTURES = ((61, 83), (20, 17), (28, 90), (140, 9))
MASKS = ((50, 37), (13, 91), (9, 5), (24, 24), (1, 3))


def smooth(rng: np.random.Generator, *shape: int) -> np.ndarray:
    noise = torch.from_numpy(rng.normal(size=(1, 1, 6, 7)))
    return interpolate(noise, shape, mode="bicubic")[0, 0].numpy()


def main() -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for i, (height, width) in enumerate(PICTURES):
        levels = np.stack([smooth(rng, height, width) for _ in range(3)], -1)
        noisy = 128 + 60 * levels + rng.normal(0, 20, levels.shape)
        picture = noisy.clip(0, 255).astype(np.uint8)
        resize = v2.Resize((SIZE, SIZE))
        resized = resize(torch.from_numpy(picture).permute(2, 0, 1))
        arrays[f"picture_{i}"] = picture
        arrays[f"resized_{i}"] = resized.permute(1, 2, 0).numpy()
    logits = (smooth(rng, 24, 24) + rng.normal(0, 0.3, (24, 24))).astype(np.float32)
    arrays["logits"] = logits
    for i, shape in enumerate(MASKS):
        large = interpolate(torch.from_numpy(logits)[None, None], shape, mode="bilinear")
        arrays[f"mask_{i}"] = (large[0, 0] > 0).numpy()
    np.savez_compressed(Path(__file__).with_name("sam_pictures.npz"), **arrays)


main()
