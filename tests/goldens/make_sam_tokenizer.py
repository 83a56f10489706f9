"""Makes `sam_tokenizer.json` with CLIP's own tokeniser, the copy in `open_clip_torch` 3.3.0.

    python make_sam_tokenizer.py DIRECTORY

`DIRECTORY` holds `tokenizer.py` and `bpe_simple_vocab_16e6.txt.gz` of that package; `torch`, `ftfy`
and `regex` must be installed. The golden file has the first merges of the vocabulary, phrases, and
the ids that this small vocabulary gives them without start and end.
"""

import gzip
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

MERGES = 600
PHRASES = [
    "yellow school bus",
    "visual",
    "a cat",
    "  A  Dog's\tTail!\n",
    "it’s 42 cats",
    "naïve café ☕",
    "wow!! (really) !$ !~ #tag",
    "salt &amp;amp; pepper",
    "日本語 テキスト",
    "we're they've I'll he'd I'm",
    "x1y22z Ⅳ ½",
    "ﬁne ligature",
    "MixedCASE ÜNÏCÖDÉ",
    "under_score-hyphen/slash",
    "the “quoted” l’homme",
    "Ã©tÃ© mojibake",
]


def main() -> None:
    directory = Path(sys.argv[1])
    spec = importlib.util.spec_from_file_location("clip_tokenizer", directory / "tokenizer.py")
    clip = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(clip)
    published = directory / "bpe_simple_vocab_16e6.txt.gz"
    lines = gzip.decompress(published.read_bytes()).decode().split("\n")
    with tempfile.NamedTemporaryFile(suffix=".gz") as file:
        file.write(gzip.compress("\n".join(lines[: MERGES + 1]).encode()))
        file.flush()
        small = clip.SimpleTokenizer(file.name)
    golden = {
        "merges": lines[1 : MERGES + 1],
        "start": small.sot_token_id,
        "end": small.eot_token_id,
        "phrases": {phrase: small.encode(phrase) for phrase in PHRASES},
    }
    out = Path(__file__).with_name("sam_tokenizer.json")
    out.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


main()
