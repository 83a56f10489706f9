"""What a `Segmenter` is made of: prompts, batches and caches, results and their conversions."""

from jaxinfer.pictures import PictureError
from jaxinfer.sam.preprocess import Picture
from jaxinfer.sam.tokenizer import PromptError
from jaxinfer.segmentation.coco import CocoDataset, to_coco
from jaxinfer.segmentation.drawing import draw
from jaxinfer.segmentation.engine import SegmenterStats
from jaxinfer.segmentation.prompts import Prompt
from jaxinfer.segmentation.results import Instance, Segmentation

__all__ = [
    "CocoDataset",
    "Instance",
    "Picture",
    "PictureError",
    "Prompt",
    "PromptError",
    "Segmentation",
    "SegmenterStats",
    "draw",
    "to_coco",
]
