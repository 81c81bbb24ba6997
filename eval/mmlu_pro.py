"""MMLU-Pro (arXiv 2406.01574): questions with up to ten options, preceded by worked examples of the same category.

The prompt is one user turn. Where it is too long, it loses examples, the last one first, as in the authors' script.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxrl_llm import components
from jaxrl_llm.data import files
from jaxrl_llm.data.templates import Templated
from jaxrl_llm.eval.choice_questions import Item, as_prompt, lettered, read
from jaxrl_llm.eval.choices import LETTERS
from jaxrl_llm.experience import Prompt

INSTRUCTION = (
    "The following are multiple choice questions (with answers) about {category}. Think step by step and then finish your "
    'answer with "the answer is (X)" where X is the correct letter choice.'
)
THINK = "Answer: Let's think step by step."


@dataclass(frozen=True, kw_only=True)
class MMLUPro(Templated):
    """Asks questions with `shots` worked examples, which `shorter` removes one at a time.

    Attributes:
      path: the test questions: a file, a folder of files, or a Hugging Face dataset id.
      examples: the worked examples, with the column cot_content; empty takes the split "validation" of `path`.
      split: part of a folder or dataset.
      shots: number of worked examples in a prompt.
      limit: largest number of rows; None for all.
    """

    path: str = "TIGER-Lab/MMLU-Pro"
    examples: str = ""
    split: str = "test"
    shots: int = 5
    limit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        components.at_least(self, 0, "shots")

    def rows(self) -> Sequence[Prompt]:
        """Returns all prompts; the reference is the right letter.

        Raises:
          FileNotFoundError: there is nothing at `path` or `examples`.
          ValueError: a row is bad, or a category has fewer than `shots` examples.
        """
        worked = self._worked() if self.shots else {}
        prompts = []
        for number, item in enumerate(read(self.path, self.split, limit=self.limit)):
            shots = worked.get(item.category, [])[: self.shots]
            if len(shots) < self.shots:
                raise ValueError(
                    f"category {item.category!r} has {len(shots)} worked examples: lower mmlu_pro.MMLUPro.shots "
                    f"(now {self.shots}), or name a file that has more"
                )
            prompts.append(self._prompt(f"mmlu_pro/{number}", item, shots))
        return prompts

    def shorter(self, prompt: Prompt) -> Prompt | None:
        """Returns the prompt with one worked example fewer; None where it has none."""
        shots = prompt.extra["shots"]
        if not shots:
            return None
        number = LETTERS.index(prompt.reference)
        item = Item(
            question=prompt.extra["question"], options=prompt.extra["options"], answer=number,
            category=prompt.extra["category"],
        )  # fmt: skip
        return self._prompt(prompt.id, item, shots[:-1])

    def _prompt(self, name: str, item: Item, shots: Sequence[str]) -> Prompt:
        asked = INSTRUCTION.format(category=item.category)
        body = "\n\n".join([asked, *shots, f"{_question(item)}\n{THINK}"])
        prompt = as_prompt(name, "mmlu_pro", item, self.asked(body))
        return replace(prompt, extra={**prompt.extra, "shots": list(shots)})

    def _worked(self) -> dict[str, list[str]]:
        """Returns {category: worked examples as text}."""
        path = self.examples or self.path
        items = read(path, "validation")
        texts = [row["cot_content"] for _, row in files.read(path, ["cot_content"], split="validation")]
        found: dict[str, list[str]] = {}
        for item, text in zip(items, texts, strict=True):
            worked = text.strip().removeprefix("A:").removeprefix("Answer:").strip()
            found.setdefault(item.category, []).append(f"{_question(item)}\nAnswer: {worked}")
        return found


def _question(item: Item) -> str:
    return f"Question: {item.question}\nOptions:\n{lettered(item.options)}"
