"""Writes a small project that trains as it is: a reward with its test, data, and a gin file to begin from."""

import json
from pathlib import Path

SUBJECTS = (
    "rain", "snow", "bread", "rivers", "stones", "horses", "music", "winter", "bridges", "maps", "salt", "clocks", "birds", "paper", "iron",
    "gardens", "ships", "lamps",
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz "

REWARD = '''"""The reward of this project: a function of a prompt and the text that answers it; other columns of data.jsonl come by name."""


def reward(prompt, text, letters):
    """The share of the response's characters that are among `letters`."""
    return sum(character in letters for character in text) / max(len(text), 1)
'''

TEST = '''"""python -m pytest test_reward.py"""

from reward import reward


def test_the_share_of_wanted_characters_counts():
    assert reward("Write about rain.", "baab", "ab") == 1.0
    assert reward("Write about rain.", "a??!", "ab") == 0.25


def test_an_empty_response_earns_nothing():
    assert reward("Write about rain.", "", "ab") == 0.0
'''

GIN = """# {name}: `jaxrl train run.gin` in this folder; `jaxrl train run.gin steps=200 run_dir=runs/longer` overrides a setting.
# The model is a tiny one of random parameters, for a CPU. For a trained one: `jaxrl train run.gin model=FOLDER_OR_HUB_ID`.
from __gin__ import dynamic_registration

include 'gin/base.gin'
include 'gin/models/qwen3_tiny.gin'
include 'gin/data/byte_tokenizer.gin'
include 'gin/data/rows.gin'
include 'gin/rewards/function.gin'
include 'gin/algorithms/grpo.gin'
include 'gin/samplers/embedded.gin'

RUN_DIR = 'runs/{name}'
DATA_SOURCE = 'data.jsonl'
REWARD_FUNCTION = 'reward.py:reward'

STEPS = 20
PROMPTS_PER_STEP = 8
GROUP_SIZE = 8
LEARNING_RATE = 1e-3
PROMPT_LIMIT = 40     # tokens, which are bytes here
RESPONSE_LIMIT = 8
ROW_TOKENS = 48
ROWS = 16
"""


def write(folder: Path) -> str:
    """Writes the project into a new folder; returns a message with the next commands.

    Raises:
      FileExistsError: the folder exists and is not empty.
    """
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise FileExistsError(f"{folder} exists: give another name")
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"Write about {subject}.", "letters": LETTERS} for subject in SUBJECTS]
    files = {
        "reward.py": REWARD,
        "test_reward.py": TEST,
        "run.gin": GIN.format(name=folder.resolve().name),
        "data.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return f"wrote {', '.join(files)} in {folder}\n\n    cd {folder}\n    python -m pytest -q    # pip install pytest\n    jaxrl train run.gin"
