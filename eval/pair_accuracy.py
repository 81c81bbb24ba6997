"""Precision, recall, F1 and accuracy of a partition classifier on labelled pairs.

`python -m jaxrl_llm.eval.pair_accuracy --model FOLDER --pairs val.jsonl [--threshold 0.5] [--cls TOKEN --sep TOKEN]`
"""

import asyncio
import json
from collections.abc import Sequence

import numpy as np

from jaxrl_llm import command_line
from jaxrl_llm.data.similar_pairs import Labelled, SimilarPairs
from jaxrl_llm.data.tokenizer import PretrainedTokenizer
from jaxrl_llm.distributed import compilation_cache
from jaxrl_llm.models.reward_models import HFPairs, HFRewardModel
from jaxrl_llm.rewards.monitor import detection
from jaxrl_llm.rewards.pairs import Pairwise


def accuracy(classifier: Pairwise, labelled: Sequence[Labelled], threshold: float = 0.5) -> dict[str, float]:
    """Computes counts, precision, recall, F1 and accuracy of the decision P(same class) > threshold."""
    said = np.asarray(asyncio.run(_asked(classifier, labelled)), np.float64)
    truth = np.array([float(similar) for *_, similar in labelled], np.float64)
    known = np.ones(len(truth), bool)
    right = (said > threshold) == (truth > 0.5)
    return {**detection((said > threshold).astype(np.float64), truth, known), "accuracy": float(right.mean())}


async def _asked(classifier: Pairwise, labelled: Sequence[Labelled]) -> Sequence[float]:
    return await classifier.similar([(first, second) for first, second, _ in labelled])


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser("eval.pair_accuracy", __doc__)
    parser.add_argument("--model", required=True, help="folder of the classifier, with its tokenizer")
    parser.add_argument("--pairs", required=True, help="rows {generation_0, generation_1, similar}")
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--cls", default=HFPairs.cls, help="the token that opens a pair")
    parser.add_argument("--sep", default=HFPairs.sep, help="the token that ends each text")
    arguments = parser.parse_args(argv)
    compilation_cache.keep()
    tokenizer = PretrainedTokenizer(path=arguments.model)
    classifier = HFPairs(
        model=HFRewardModel(folder=arguments.model), tokenizer=tokenizer, cls=arguments.cls, sep=arguments.sep
    )
    labelled = SimilarPairs(path=arguments.pairs, tokenizer=tokenizer).labelled()
    print(json.dumps(accuracy(classifier, labelled, arguments.threshold), indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
