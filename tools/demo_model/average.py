"""Weights between those of two trainings: what the later one learned, and less of what it forgot.

    python -m tools.demo_model.average EARLIER LATER OUT [--share 0.7]

Both were trained on from one another, so a straight line between them is as good a model as they
are (Wortsman et al., "Model soups", arXiv 2203.05482). OUT gets the later one's other files.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def main() -> None:
    """Read, average in float32, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("earlier", type=Path)
    parser.add_argument("later", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--share", type=float, default=0.7, help="of the later one")
    asked = parser.parse_args()
    share = asked.share
    earlier, later = (load_file(folder / WEIGHTS) for folder in (asked.earlier, asked.later))
    with safe_open(asked.later / WEIGHTS, "pt") as file:
        metadata = file.metadata()
    averaged = {
        name: ((1 - share) * old.float() + share * later[name].float()).to(old.dtype)
        for name, old in earlier.items()
    }
    shutil.copytree(asked.later, asked.out, dirs_exist_ok=True)
    save_file(averaged, asked.out / WEIGHTS, metadata=metadata)


if __name__ == "__main__":
    main()
