"""Results as one COCO data set."""

from collections.abc import Iterable
from typing import Any

from jaxinfer.segmentation.results import Segmentation


class CocoDataset:
    """Collects results, of which it keeps run lengths only."""

    def __init__(self) -> None:
        self._images: list[dict[str, Any]] = []
        self._annotations: list[dict[str, Any]] = []
        self._categories: dict[str, int] = {}

    def add(self, result: Segmentation) -> None:
        """Add a picture with its objects; one without a name is called after its number."""
        image = len(self._images) + 1
        self._images.append(
            {
                "id": image,
                "file_name": result.name or f"{image}",
                "width": result.width,
                "height": result.height,
            }
        )
        for name in result.prompts:
            self._categories.setdefault(name, len(self._categories) + 1)
        for found in result.objects:
            left, top, right, bottom = found.box
            self._annotations.append(
                {
                    "id": len(self._annotations) + 1,
                    "image_id": image,
                    "category_id": self._categories[found.prompt],
                    "segmentation": found.rle(),
                    "bbox": [left, top, right - left, bottom - top],
                    "area": found.area,
                    "iscrowd": 0,
                    "score": found.score,
                }
            )

    def as_dict(self) -> dict[str, Any]:
        """`images`, `annotations` and `categories`, all numbered from 1, ready for JSON.

        `pycocotools.coco.COCO` reads it; since every annotation has a `score`, their list is a
        result file for `COCO.loadRes`.
        """
        return {
            "info": {"description": "found by jaxinfer"},
            "images": self._images,
            "annotations": self._annotations,
            "categories": [
                {"id": number, "name": name} for name, number in self._categories.items()
            ],
        }


def to_coco(results: Iterable[Segmentation]) -> dict[str, Any]:
    """One COCO data set of some results; see `CocoDataset`."""
    dataset = CocoDataset()
    for result in results:
        dataset.add(result)
    return dataset.as_dict()
