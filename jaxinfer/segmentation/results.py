"""What was found in pictures, and its conversion to what others read."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from jaxinfer.segmentation import export
from jaxinfer.segmentation.export import Polygon, RunLengths

if TYPE_CHECKING:
    from supervision import Detections


@dataclass(frozen=True, eq=False)
class Instance:
    """One object.

    Attributes:
        outline: the mask as run lengths, of which all else about it is made when it is asked for.
        box: left, top, right and bottom in pixels, within the picture. It is the model's own
            estimate, so it need not touch the mask; for points it is drawn around the mask.
        score: from 0 to 1; for points the model's estimate of the mask's IoU.
        prompt: what it was found for: `Prompt.name`.
        prompt_index: which of the picture's prompts that was.
    """

    outline: RunLengths
    box: tuple[float, float, float, float]
    score: float
    prompt: str
    prompt_index: int = 0

    @cached_property
    def mask(self) -> np.ndarray:
        """bool `[height, width]`, at the size of the upright picture."""
        return export.from_rle(self.outline)

    @cached_property
    def area(self) -> int:
        """Pixels in the mask."""
        return export.area(self.outline)

    def rle(self) -> RunLengths:
        """The mask as COCO's compressed run lengths: `size` (height, width) and `counts`."""
        return dict(self.outline)

    def polygons(self) -> list[Polygon]:
        """Outlines of the mask's pieces, each with its holes; see `export.to_polygons`."""
        return export.to_polygons(self.mask)

    def png(self) -> bytes:
        """The mask as a PNG file of one bit a pixel."""
        return export.to_png(self.mask)


@dataclass(frozen=True, eq=False)
class Segmentation:
    """What was found in one picture.

    Attributes:
        width: of the upright picture, in pixels.
        height: likewise.
        objects: in the order of the prompts, for each the best first.
        prompts: `Prompt.name` of each.
        presence: for each prompt, how sure the model is that there is any such thing, from 0 to 1;
            None for points.
        name: of the picture's file, or None.
    """

    width: int
    height: int
    objects: tuple[Instance, ...]
    prompts: tuple[str, ...]
    presence: tuple[float | None, ...]
    name: str | None = None

    def label_map(self) -> np.ndarray:
        """uint16 `[height, width]`: 1 + the object's index, 0 for none; the best lies on top."""
        labels = np.zeros((self.height, self.width), np.uint16)
        for index in sorted(range(len(self.objects)), key=lambda i: self.objects[i].score):
            labels[self.objects[index].mask] = index + 1
        return labels

    def png(self) -> bytes:
        """`label_map` as a PNG file: of 8 bits a pixel, or of 16 for more than 255 objects."""
        labels = self.label_map()
        return export.to_png(labels if len(self.objects) > 255 else labels.astype(np.uint8))

    def to_supervision(self) -> "Detections":
        """`supervision.Detections`, with the prompts as `data["class_name"]`.

        Raises ImportError with the remedy if that library is not installed.
        """
        try:
            from supervision import Detections
        except ImportError as error:
            raise ImportError(
                "to_supervision() needs the supervision library: pip install supervision"
            ) from error
        if not self.objects:
            return Detections.empty()
        return Detections(
            xyxy=np.array([found.box for found in self.objects], np.float32),
            mask=np.stack([found.mask for found in self.objects]),
            confidence=np.array([found.score for found in self.objects], np.float32),
            class_id=np.array([found.prompt_index for found in self.objects]),
            data={"class_name": np.array([found.prompt for found in self.objects])},
        )
