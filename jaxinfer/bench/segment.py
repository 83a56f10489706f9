"""Segmenting pictures: throughput from JPEG files to run lengths, latency, memory, kernels.

Weights drawn at random give no score a meaning, so every picture is asked for a stated number of
objects whatever their scores. All pictures have one prompt, whose text features are remembered
after the first time; embeddings of pictures are not, unless a line says so.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinfer.bench.photos import photo
from jaxinfer.bench.sam_roofline import operations
from jaxinfer.bench.sam_subjects import SamSubject
from jaxinfer.bench.segment_device import (
    Programs,
    break_down_device,
    compile_programs,
    measure_device,
    seconds,
)
from jaxinfer.bench.segment_peer import beside
from jaxinfer.sam.preprocess import read_picture
from jaxinfer.segmentation import Segmentation
from jaxinfer.segmenter import Segmenter

Record = dict[str, Any]

PROMPT = "person"
WARM_UP, REPEATS = 3, 30
"""Single calls before those that are timed, and those."""
MOST_BATCHES = 32
"""Batches of a timed stream."""


class Size(NamedTuple):
    """Of a picture, in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        batches: pictures that are embedded together.
        sizes: of the pictures.
        pictures: of a timed stream, at most.
        objects: that every picture is asked for.
    """

    batches: Sequence[int] = (1, 8, 16)
    sizes: Sequence[Size] = (Size(1008, 1008), Size(1920, 1080))
    pictures: int = 256
    objects: int = 10

    @property
    def usual(self) -> int:
        """The batch at which memory is told and kernels are traced: 8 if it is among them."""
        return 8 if 8 in self.batches else max(self.batches)


class Rig:
    """A model with all that is needed to measure it, made when it is first asked for."""

    def __init__(self, subject: SamSubject, plan: Plan) -> None:
        self.subject, self.plan = subject, plan
        self._segmenters: dict[tuple[int, bool], Segmenter] = {}
        self._programs: dict[int, Programs] = {}
        self._photos: dict[Size, list[bytes]] = {}

    def segmenter(self, batch: int, *, remembers: bool = False) -> Segmenter:
        """For batches of that size; `remembers` pictures or not."""
        key = (batch, remembers)
        if key not in self._segmenters:
            options: dict[str, Any] = {} if remembers else {"cache_bytes": 0}
            self._segmenters[key] = Segmenter(self.subject.model, max_batch=batch, **options)
        return self._segmenters[key]

    def programs(self, batch: int) -> Programs:
        """The device's part for so many pictures."""
        if batch not in self._programs:
            photos = self.photos(self.plan.sizes[0])
            model = self.subject.model
            side = model.config.trunk.image_size
            pictures = [read_picture(file, side) for file in islice(cycle(photos), batch)]
            pixels = np.stack([picture.pixels for picture in pictures])
            self._programs[batch] = compile_programs(model.params, model.config, pixels)
        return self._programs[batch]

    def photos(self, size: Size) -> list[bytes]:
        """JPEG files of that size, as many as the largest batch, all of them different."""
        if size not in self._photos:
            with ThreadPoolExecutor() as pool:
                one = partial(photo, size.width, size.height)
                self._photos[size] = list(pool.map(one, range(max(self.plan.batches))))
        return self._photos[size]

    def stream(self, batch: int, size: Size, pictures: int) -> Iterator[Segmentation]:
        """Results for so many pictures."""
        files = list(islice(cycle(self.photos(size)), pictures))
        options: dict[str, Any] = {"threshold": 0, "max_objects": self.plan.objects}
        return self.segmenter(batch).stream(files, PROMPT, **options)

    def warm_up(self, parts: Sequence[str]) -> None:
        """Compile what these parts will need, side by side; what fails is told where it is used."""
        jobs: list[Callable[[], Any]] = []
        for size in self.plan.sizes:
            self.photos(size)
        if "throughput" in parts:
            sizes = self.plan.sizes
            jobs += [partial(self.try_out, batch, *sizes) for batch in self.plan.batches]
        if "device" in parts:
            jobs += [partial(self.programs, batch) for batch in self.plan.batches]
        if jobs:
            with ThreadPoolExecutor(len(jobs)) as pool:
                wait([pool.submit(job) for job in jobs])

    def try_out(self, batch: int, *sizes: Size) -> None:
        """Two batches of pictures of each size."""
        for size in sizes:
            for result in self.stream(batch, size, 2 * batch):
                _encode(result)


class Point(NamedTuple):
    """One line of a benchmark: where it is measured, and how."""

    where: Record
    measure: Callable[[], Record]


def memory(rig: Rig) -> Iterator[Point]:
    """The most device memory that was in use, before larger batches use more."""
    batch = rig.plan.usual

    def measure() -> Record:
        params = jax.tree.leaves(rig.subject.model.params)
        before = jax.devices()[0].memory_stats() or {}
        for result in rig.stream(batch, rig.plan.sizes[0], 4 * batch):
            _encode(result)
        after = jax.devices()[0].memory_stats() or {}
        return {
            "parameter_bytes": sum(leaf.nbytes for leaf in params),
            "bytes_before": before.get("bytes_in_use"),
            "peak_bytes": after.get("peak_bytes_in_use"),
        }

    yield Point({"batch": batch}, measure)


def throughput(rig: Rig) -> Iterator[Point]:
    """Pictures a second of a stream of JPEG files in memory, to run lengths on the host."""
    for batch in rig.plan.batches:
        for size in rig.plan.sizes:
            where = {"batch": batch, "size": str(size)}
            yield Point(where, partial(_throughput, rig, batch, size))


def _throughput(rig: Rig, batch: int, size: Size) -> Record:
    pictures = -(-min(rig.plan.pictures, MOST_BATCHES * batch) // batch) * batch
    rig.try_out(batch, size)
    objects = coded = 0
    result = None
    began = time.perf_counter()
    for result in rig.stream(batch, size, pictures):
        lengths = _encode(result)
        objects, coded = objects + len(lengths), coded + sum(lengths)
    took = (time.perf_counter() - began) / pictures
    cfg, kind = rig.subject.model.config, jax.devices()[0].device_kind
    least = operations(cfg).least_seconds(1, 1, fp8=rig.subject.fp8, kind=kind)
    return {
        "pictures": pictures,
        "jpeg_bytes": round(float(np.mean([len(file) for file in rig.photos(size)]))),
        "images_per_second": round(1 / took, 2),
        "milliseconds_a_picture": round(1e3 * took, 3),
        "share_of_ceiling": None if np.isnan(least) else round(least / took, 4),
        "objects_a_picture": round(objects / pictures, 2),
        "rle_bytes_a_mask": round(coded / max(1, objects)),
        "runs_a_mask": _runs(result),
    }


def latency(rig: Rig) -> Iterator[Point]:
    """One picture and one prompt at a time: a new picture, then prompts on one that is known."""
    for size in rig.plan.sizes:
        for source in ("JPEG file", "decoded picture"):
            where = {"what": f"a new {source}", "size": str(size)}
            yield Point(where, partial(_new_picture, rig, size, source))
    for words in ("known", "new"):
        where = {"what": f"a further prompt, {words} words", "size": str(rig.plan.sizes[0])}
        yield Point(where, partial(_further_prompt, rig, words == "new"))


def _new_picture(rig: Rig, size: Size, source: str) -> Record:
    segmenter, files = rig.segmenter(1), rig.photos(size)
    sources = files if source == "JPEG file" else [segmenter.read(file) for file in files]
    times = [_ask(rig, segmenter, one) for one in islice(cycle(sources), WARM_UP + REPEATS)]
    return _milliseconds(times)


def _further_prompt(rig: Rig, new_words: bool) -> Record:
    segmenter = rig.segmenter(1, remembers=True)
    picture = segmenter.read(rig.photos(rig.plan.sizes[0])[0])
    words = [f"{PROMPT} {number}" if new_words else PROMPT for number in range(WARM_UP + REPEATS)]
    told = _milliseconds([_ask(rig, segmenter, picture, each) for each in words])
    programs = rig.programs(1)
    alone = 1e3 * seconds(partial(programs.find, programs.look()))
    p50 = told["milliseconds"]["p50"]
    return told | {
        "detect_milliseconds": round(alone, 3),
        "rest_milliseconds": round(p50 - alone, 3),
    }


def _ask(rig: Rig, segmenter: Segmenter, picture: Any, words: str = PROMPT) -> float:
    """Seconds from a question to run lengths."""
    began = time.perf_counter()
    _encode(segmenter.segment(picture, words, threshold=0, max_objects=rig.plan.objects))
    return time.perf_counter() - began


def device(rig: Rig) -> Iterator[Point]:
    """The device's part alone."""
    cfg, fp8 = rig.subject.model.config, rig.subject.fp8
    for batch in rig.plan.batches:
        measure = partial(lambda b: measure_device(rig.programs(b), cfg, fp8=fp8), batch)
        yield Point({"batch": batch}, measure)


def kernels(rig: Rig) -> Iterator[Point]:
    """The device's part by kernel and by family."""
    batch = rig.plan.usual
    yield Point({"batch": batch}, lambda: break_down_device(rig.programs(batch)))


PARTS: Mapping[str, tuple[str, Callable[[Rig], Iterator[Point]]]] = {
    "memory": ("segment-memory", memory),
    "throughput": ("segment", throughput),
    "latency": ("segment-latency", latency),
    "device": ("segment-device", device),
    "kernels": ("segment-kernels", kernels),
}
"""What can be measured, in the order in which it is: the name of its lines, and its points."""


def measure_segment(
    subject: SamSubject, plan: Plan, parts: Sequence[str], peers: Sequence[Record] = ()
) -> Iterator[Record]:
    """Measure `parts` of `PARTS`; where that fails, the line has `failure` and the next follows.

    Args:
        subject: the model.
        plan: batches, sizes and counts.
        parts: names of `PARTS`.
        peers: lines of peers, which are put beside ours for the same batch.
    """
    rig = Rig(subject, plan)
    common = {"model": subject.name, "weights": subject.weights, "fp8": subject.fp8}
    common |= {"prompts_a_picture": 1, "objects_asked_for": plan.objects}
    warm = False
    for name, (bench, points) in PARTS.items():
        if name not in parts:
            continue
        if name != "memory" and not warm:  # that of larger batches would count
            rig.warm_up(parts)
            warm = True
        for where, measure in points(rig):
            line = {"bench": bench, **common, **where}
            try:
                line |= measure()
            except Exception as error:
                yield line | {"failure": f"{type(error).__name__}: {error}"[:2000]}
                continue
            yield beside(line, peers) if "images_per_second" in line else line


def _encode(result: Segmentation) -> list[int]:
    """Make the run lengths of all objects; their bytes."""
    return [len(found.rle()["counts"]) for found in result.objects]


def _runs(result: Segmentation | None) -> int | None:
    """Runs of a mask on average, counted down the columns as COCO does."""
    if result is None or not result.objects:
        return None
    columns = np.stack([found.mask.T.reshape(-1) for found in result.objects])
    return round(float(1 + np.count_nonzero(columns[:, 1:] != columns[:, :-1], 1).mean()))


def _milliseconds(times: Sequence[float]) -> Record:
    """Median and ninth decile of seconds, the first few left out."""
    p50, p90 = np.percentile(1e3 * np.array(times[WARM_UP:]), (50, 90))
    return {"milliseconds": {"p50": round(p50, 3), "p90": round(p90, 3)}}
