"""Prompt rows of the official package, in its environment: `python official_prompts.py CHECKPOINT FOLDER`."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from talkray_tools.official import OfficialModel

FOLDER = Path(sys.argv[2])


class Prompted(Exception):
    """Nothing is generated behind the prompt."""


def keep(**prompt: Any) -> None:
    prompts.append(prompt)
    raise Prompted


prompts: list[dict[str, Any]] = []
torch.set_num_threads(1)
official = OfficialModel(sys.argv[1])
official.package.model.talker.generate = keep
for case in json.loads((FOLDER / "cases.json").read_text()):
    with suppress(Prompted):
        official.say(**case)
names = {"rows": "inputs_embeds", "trailing": "trailing_text_hidden"}
kept = {
    f"{name}-{number}": prompt[key][0].detach().numpy()
    for number, prompt in enumerate(prompts)
    for name, key in names.items()
}
np.savez(FOLDER / "rows.npz", **kept)
