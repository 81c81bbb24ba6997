"""Evaluation harness: a model folder or a run's checkpoint answers a set of prompts; one folder holds the results.

RESULTS/samples.jsonl holds a record of each response (eval/answered.py), summary.json the metrics with their 95% intervals and the
configuration; identity.json guards against results of two configurations in one folder. The same command continues where it stopped,
and grades invalid responses again, for example those from a time when a judge was down.
"""

import asyncio
import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np

from jaxrl_llm import components
from jaxrl_llm.data.pipeline import Encoder
from jaxrl_llm.data.tokenizer import with_stop_ids
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner, to_host
from jaxrl_llm.eval.answered import Answered, Record, Report, estimate, records
from jaxrl_llm.eval.asking import Asking
from jaxrl_llm.eval.evaluate import SEED, Evaluation, check_reward
from jaxrl_llm.eval.progress import Progress
from jaxrl_llm.eval.results import Results, described, same_configuration, write_whole
from jaxrl_llm.experience import Prompt, Rollout, seed_of
from jaxrl_llm.metrics import run_folder
from jaxrl_llm.metrics.rollout_rows import token_streams
from jaxrl_llm.metrics.run_lock import locked
from jaxrl_llm.models.sources import ModelSource, Opened
from jaxrl_llm.protocols import Params, SamplerFactory
from jaxrl_llm.rollouts.collect import RolloutGenerator

SCHEMA = 1
SUMMARY = "summary.json"
GRADED_AT_A_TIME = 32  # groups of an earlier start that are graded at the same time
ASKED_AT_A_TIME = 128  # prompts whose successive answers are requested in one block


@runtime_checkable
class Shortening(Protocol):
    """A dataset whose prompts can be shortened by parts, such as few-shot examples."""

    def shorter(self, prompt: Prompt) -> Prompt | None:
        """Returns the prompt with one part fewer; None where nothing is left to remove."""
        ...


@dataclass(frozen=True, kw_only=True)
class Harness:
    """Evaluates a model; a gin file builds it, and `run` executes it.

    Attributes:
      out_dir: folder of the results.
      model: the model that answers.
      sampler: sampler of the model.
      evaluation: the prompts, the kinds of answers and the measures.
      mesh: sizes of the mesh axes.
      seed: seed of the answers, mixed with a prompt's index in its dataset.
      max_prompt_tokens: most tokens of a prompt; longer ones lose few-shot examples where they have any, then `truncation` applies.
      truncation: "drop" (counted in the summary), "left" (cuts the beginning) or "error".
      template_kwargs: keyword arguments of the chat template, such as {"enable_thinking": False}.
      progress_s: seconds between progress lines.
      show_tokens: number of tokens per response whose text and log-prob are kept for the viewer; 0 keeps none.
      asking: form in which each sampled answer is requested; None samples all answers to the same prompt.
    """

    out_dir: str
    model: ModelSource
    sampler: SamplerFactory
    evaluation: Evaluation
    mesh: MeshConfig = field(default_factory=MeshConfig)
    seed: int = SEED
    max_prompt_tokens: int = 2048
    truncation: Literal["drop", "left", "error"] = "drop"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    progress_s: float = 10.0
    show_tokens: int = 512
    asking: Asking | None = None

    @property
    def max_length(self) -> int:
        """The largest number of tokens of a prompt and its response together."""
        return self.max_prompt_tokens + self.evaluation.settings.max_tokens

    def rows(self) -> list[Prompt]:
        """Returns the prompts before encoding; raises ValueError where two share an id."""
        rows = list(self.evaluation.data.rows())[: self.evaluation.limit]
        twice = [name for name, count in Counter(row.id for row in rows).items() if count > 1]
        if twice:
            raise ValueError(f"the ids of an evaluation's prompts must differ (twice: {twice[:3]})")
        return rows

    def opened(self, partitioner: Partitioner) -> Opened:
        """Opens the model; raises ValueError where it has fewer positions than prompts and responses may take."""
        model = self.model.open(partitioner)
        if self.max_length > (most := model.policy.architecture.max_positions):
            raise ValueError(
                f"a prompt of {self.max_prompt_tokens} tokens with a response of {self.evaluation.settings.max_tokens} is more than the {most} "
                f"positions of {model.name}: lower PROMPT_LIMIT or RESPONSE_LIMIT"
            )
        return model

    def run(self, config: str = "") -> None:
        """Answers, grades and summarises; `config` is the gin text, which is stored with the results."""
        folder = run_folder.writable(Path(self.out_dir), "OUT_DIR")
        with locked(folder, "OUT_DIR"), asyncio.Runner() as runner:
            rows = self.rows()
            evaluating = Evaluating(self, folder, rows, self.opened(Partitioner.create(self.mesh)))
            try:
                runner.run(evaluating.answer(config))
            finally:
                runner.run(evaluating.close())
            evaluating.finish(config)


class Evaluating:
    """An evaluation in progress."""

    def __init__(self, harness: Harness, folder: Path, rows: Sequence[Prompt], model: Opened) -> None:
        self.harness, self.folder, self.model = harness, folder, model
        self.evaluation = harness.evaluation
        if self.evaluation.reward is not None:
            check_reward(self.evaluation.name, self.evaluation.reward)
        if len(model.tokenizer) > (size := model.policy.architecture.vocabulary_size):
            raise ValueError(
                f"the tokenizer of {model.name} has {len(model.tokenizer)} tokens and the model's vocabulary {size}: "
                "give a folder whose tokenizer is the model's"
            )
        self.encoder = Encoder(
            tokenizer=model.tokenizer, max_prompt_tokens=harness.max_prompt_tokens, truncation=harness.truncation,
            template_kwargs=harness.template_kwargs,
        )  # fmt: skip
        self.forms = replace(self.encoder)  # encodes prompts that `asking` makes, which are not counted
        encoded = [self._encode(row) for row in rows]
        self.places = {p.id: i for i, p in enumerate(encoded) if p is not None}
        self.prompts = {p.id: p for p in encoded if p is not None}
        if not self.prompts:
            raise ValueError(
                f"none of {len(rows)} prompts fits in {harness.max_prompt_tokens} tokens: raise harness.Harness.max_prompt_tokens"
            )
        self.sampler: Any = None

    def _encode(self, row: Prompt) -> Prompt | None:
        """Returns the prompt with its tokens, shortened where possible; None where it is dropped."""
        data = self.evaluation.data
        if isinstance(data, Shortening):
            measure = Encoder(tokenizer=self.model.tokenizer, max_prompt_tokens=self.harness.max_prompt_tokens)
            while measure.prompt(row) is None and (less := data.shorter(row)) is not None:
                row = less
        return self.encoder.prompt(row)

    # -- answering -----------------------------------------------------------------------------------------------------

    async def answer(self, config: str) -> None:
        """Completes the results; prompts that already have answers are not sampled again."""
        params = self.model.params()
        self.hash = model_hash(params)
        same_configuration(self.folder, self._identity())
        run_folder.provenance(self.folder, self.harness.seed, config)
        wanted = {(name, kind): n for kind, n in self.evaluation.kinds.items() for name in self.prompts}
        self.results = Results(self.folder, wanted)
        self.progress = Progress(
            name=self.evaluation.name, total=sum(wanted.values()), every_s=self.harness.progress_s,
            groups=self.results.groups.values(),
        )  # fmt: skip
        self._announce()
        await self._grade_again()
        if len(self.results.groups) == len(wanted):
            return
        harness, model = self.harness, self.model
        self.sampler = harness.sampler.start(
            model.policy, model.tokenizer, max_length=harness.max_length, run_dir=self.folder
        )
        await self.sampler.publish(params, 0)
        for kind, n in self.evaluation.kinds.items():
            await self._ask(kind, n)

    async def _ask(self, kind: str, n: int) -> None:
        """Samples answers of one kind for the prompts that lack them; groups are graded while others are sampled."""
        prompts = [p for name, p in self.prompts.items() if (name, kind) not in self.results.groups]
        asking = self.harness.asking if kind == "sampled" else None
        answers = self._same(prompts, kind, n) if asking is None else self._each(asking, prompts, kind, n)
        try:
            async with asyncio.TaskGroup() as grading:
                async for rollouts in answers:
                    grading.create_task(self._record(rollouts, kind))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _same(self, prompts: Sequence[Prompt], kind: str, n: int) -> AsyncIterator[list[Rollout]]:
        """Yields n answers to each prompt, as they finish."""
        settings = with_stop_ids(self.evaluation.asked(kind), self.model.tokenizer)
        seeds = [seed_of(self.harness.seed, self.places[p.id]) for p in prompts]
        generator = RolloutGenerator(sampler=self.sampler, tokenizer=self.model.tokenizer)
        async for _, rollouts in generator.groups(prompts, n, settings, seeds):
            yield rollouts

    async def _each(self, asking: Asking, prompts: Sequence[Prompt], kind: str, n: int) -> AsyncIterator[list[Rollout]]:
        """Yields n answers to each prompt, the k-th to its k-th form; it asks by blocks and yields a block as one."""
        settings = with_stop_ids(self.evaluation.asked(kind), self.model.tokenizer)
        generator = RolloutGenerator(sampler=self.sampler, tokenizer=self.model.tokenizer)
        for start in range(0, len(prompts), ASKED_AT_A_TIME):
            block = prompts[start : start + ASKED_AT_A_TIME]
            found: list[list[Rollout]] = [[] for _ in block]
            for k in range(n):
                forms = [self._form(asking, p, [r.text for r in had]) for p, had in zip(block, found, strict=True)]
                seeds = [seed_of(seed_of(self.harness.seed, self.places[p.id]), k) for p in block]
                async for i, [rollout] in generator.groups(forms, 1, settings, seeds):
                    found[i].append(replace(rollout, prompt=block[i]))
            for rollouts in found:
                yield rollouts

    def _form(self, asking: Asking, prompt: Prompt, before: Sequence[str]) -> Prompt:
        form = self.forms.prompt(asking.form(prompt, before))
        if form is None:
            raise ValueError(
                f"prompt {prompt.id!r} is longer than {self.harness.max_prompt_tokens} tokens after {len(before)} answers: raise PROMPT_LIMIT, or "
                "lower RESPONSE_LIMIT or SAMPLES"
            )
        return form

    async def _record(self, rollouts: Sequence[Rollout], kind: str) -> None:
        try:
            group = await self._graded(rollouts, kind)
        except (Exception, asyncio.CancelledError):  # for example, a judge that is down: the responses are kept
            self.results.add(self._with_tokens(records(rollouts, None, kind, self.evaluation.answer), rollouts))
            raise
        group = self._with_tokens(group, rollouts)
        self.results.add(group)
        self.progress.add(group)

    async def _graded(self, rollouts: Sequence[Rollout], kind: str) -> list[Record]:
        reward = self.evaluation.reward
        scores = await reward.score(rollouts) if reward is not None else None
        return records(rollouts, scores, kind, self.evaluation.answer)

    def _with_tokens(self, group: Sequence[Record], rollouts: Sequence[Rollout]) -> list[Record]:
        """Returns the records with the token stats of their responses, which end each line."""
        most, tokenizer = self.harness.show_tokens, self.model.tokenizer
        streams = [token_streams(r, {"sampler_logprob": r.sampler_logprobs}, tokenizer, most) for r in rollouts]
        return [{**record, **found} for record, found in zip(group, streams, strict=True)]

    async def _grade_again(self) -> None:
        """Grades groups with an invalid or missing score from their texts; grades are kept if a later one fails."""
        graded = self.evaluation.reward is not None
        again = [key for key, group in self.results.groups.items() if graded and any(map(_invalid, group))]
        if not again:
            return
        turns = asyncio.Semaphore(GRADED_AT_A_TIME)

        async def grade(name: str, kind: str) -> None:
            old = self.results.groups[name, kind]
            async with turns:
                new = await self._graded([_as_rollout(record, self.prompts[name]) for record in old], kind)
            kept = [{n: o[n] for n in ("tokens", "streams") if n in o} for o in old]
            self.results.groups[name, kind] = [r | o for r, o in zip(new, kept, strict=True)]

        try:
            async with asyncio.TaskGroup() as grading:
                for key in again:
                    grading.create_task(grade(*key))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self.results.rewrite()
        left = sum(any(map(_invalid, self.results.groups[key])) for key in again)
        print(f"graded {len(again) - left} of {len(again)} groups that had invalid scores", flush=True)

    async def close(self) -> None:
        """Stops the sampler and the reward's processes, each even where the other fails."""
        async with contextlib.AsyncExitStack() as closing:
            closing.callback(components.close, self.evaluation.reward)
            if self.sampler is not None:
                closing.push_async_callback(self.sampler.close)

    def _announce(self) -> None:
        lost = {n: c for n, c in self.encoder.counts().items() if c and n not in ("rows", "kept")}
        print(
            f"evaluation {self.evaluation.name}: {len(self.prompts)} prompts, {self.progress.total} responses, "
            f"{self.progress.done} of them here already, by {self.model.name} -> {self.folder}"
            + (f" ({', '.join(f'{n} {c}' for n, c in lost.items())})" if lost else ""),
            flush=True,
        )

    # -- the summary ---------------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        """Returns the JSON-like configuration on which the records depend."""
        asked = hashlib.sha256()
        for prompt in self.prompts.values():
            asked.update(f"{prompt.id}\0{prompt.reference}\0".encode() + prompt.prefix.tobytes())
        evaluation, asking = self.evaluation, self.harness.asking
        grading = {"reward": described(evaluation.reward), "answer": described(evaluation.answer)}
        grading |= {} if asking is None else {"asking": described(asking)}
        return {
            "schema": SCHEMA,
            "model_hash": self.hash,
            "prompts_hash": asked.hexdigest(),
            **grading,
        } | self._sampling()

    def _sampling(self) -> dict[str, Any]:
        settings = with_stop_ids(self.evaluation.settings, self.model.tokenizer)
        return json.loads(
            json.dumps({**self.evaluation.kinds, "settings": asdict(settings), "seed": self.harness.seed})
        )

    def finish(self, config: str) -> None:
        """Writes summary.json and prints the metrics."""
        evaluation, groups = self.evaluation, self.results.groups
        answered = [
            Answered(prompt=prompt, records=[r for kind in evaluation.kinds for r in groups[name, kind]])
            for name, prompt in self.prompts.items()
        ]
        estimates = {name: estimate(values) for name, values in evaluation.metrics(answered).items()}
        reported: dict[str, Any] = {}
        for family in evaluation.measures:
            if isinstance(family, Report):
                reported |= family.report(answered, self.folder, self.model.name)
        counts = {n: c for n, c in self.encoder.counts().items() if c}
        summary = {
            "name": evaluation.name,
            "metrics": {name: _json(e.mean) for name, e in estimates.items()},
            "ci95": {name: _json(e.ci95) for name, e in estimates.items()},
            "n": {name: e.n for name, e in estimates.items()},
            **reported,
            "prompts": counts,
            "model": {"path": self.model.name, "hash": self.hash},
            "sampling": self._sampling(),
            "sampler": described(self.harness.sampler),
            "throughput": self._throughput(),
            "commit": run_folder.commit(),
            "gin": config,
        }
        write_whole(self.folder / SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
        for name, e in estimates.items():
            print(f"  {name:<28} {e.mean:.4f}" + (f" +- {e.ci95:.4f}" if np.isfinite(e.ci95) else ""))
        if evaluation.reward is not None and (lacking := sum(any(map(_invalid, group)) for group in groups.values())):
            print(
                f"{lacking} of {len(groups)} groups lack scores (the warnings say why): the same command asks for them again"
            )
        print(f"wrote {self.folder / SUMMARY}", flush=True)

    def _throughput(self) -> dict[str, float]:
        """Returns the throughput of this start, or of the previous one where no prompt was left to answer."""
        found, before = self.progress.throughput(), self.folder / SUMMARY
        if not found["responses"] and before.is_file():
            return json.loads(before.read_text())["throughput"]
        return found


def model_hash(params: Params) -> str:
    """Returns the SHA-256 of the parameters' names, shapes, dtypes and values, which does not depend on how the model is stored."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        digest.update(np.ascontiguousarray(to_host(leaf)).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _invalid(record: Record) -> bool:
    return record["score"] is None or None in record["scores"].values()


def _as_rollout(record: Record, prompt: Prompt) -> Rollout:
    """Returns a rollout of the recorded text, for graders that only read texts."""
    none = np.zeros(0, np.int32)
    return Rollout(
        prompt=prompt, tokens=none, sampler_logprobs=none.astype(np.float32), mask=none.astype(bool), versions=none,
        finish=record["finish"], text=record["response"],
    )  # fmt: skip


def _json(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None
