"""How the tiny segmentation checkpoint is taught: its world of drawn scenes and its training."""
