"""The built-in agent: the policy and an environment take turns, and each prompt is the exact ids before it with the new messages."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxrl_llm.agents.messages import Message, content, of_action, shortened
from jaxrl_llm.agents.rendering import Renderer
from jaxrl_llm.agents.service import TokenService
from jaxrl_llm.agents.session import Ended, Session, TooLong
from jaxrl_llm.experience import Action, Completion, Ending, Observation, Task
from jaxrl_llm.protocols import Environment


@dataclass(frozen=True, eq=False)
class Dialogue:
    """Plays an environment's episodes with the policy.

    Attributes:
      service: continues token ids by the policy.
      rendering: turns messages into ids and completions into actions.
    """

    service: TokenService
    rendering: Renderer

    async def play(self, environment: Environment, task: Task, session: Session) -> Ending:
        """Resets the environment, and lets the policy and it answer each other until it is done or a limit is reached.

        A turn that was cut off is shown to the environment like any other, with the `finish` "length".

        Args:
          environment: a new environment, which its builder closes.
          task: its `limits` of turns, tokens, length and text end the dialogue; the caller enforces those of time.
          session: where the service records the calls; its own limits end the dialogue too.

        Returns:
          The ending. `rewards` has "reward", the sum of the steps' rewards, where a step gave one, and is empty otherwise; `stop` is "done",
          "aborted", or the limit that was reached; `info` merges that of all observations, and has turns, calls by status and
          characters left out.

        Raises:
          Ended: the session was closed.
          ValueError: the template has no place for a message of the task or of the environment.
        """
        talk = _Talk(task)
        talk.begin(await environment.reset(task))
        ids = self.rendering.opening(talk.task, talk.said)
        talk.longest = min(task.limits.max_length, len(ids) + (task.limits.max_response or task.limits.max_length))
        while not talk.stop:
            completion = await self._sampled(session, ids, talk)
            if completion is None:
                break
            action = self.rendering.parse(completion.tokens, finish=completion.finish, tools=task.tools)
            talk.act(action, len(completion.tokens))
            observation = await environment.step(action)
            talk.hear(observation)
            if not talk.stop:
                ids = self._next(np.concatenate([ids, completion.tokens]), completion, talk)
        return talk.ending()

    async def _sampled(self, session: Session, ids: np.ndarray, talk: "_Talk") -> Completion | None:
        """Samples the policy's next turn; returns None, with the reason in `talk.stop`, where there is no room for one or it was aborted."""
        limits, length = talk.task.limits, len(ids)
        if length >= talk.longest:
            talk.stop = "max_length" if talk.longest == limits.max_length else "max_response"
            return None
        room = talk.longest - length
        if limits.max_tokens is not None:
            room = min(room, limits.max_tokens - talk.sampled)
        if room < 1:
            talk.stop = "max_tokens"
            return None
        try:
            completion = await self.service.continue_(
                session, ids, max_tokens=room, stop_token_ids=self.rendering.stop_token_ids
            )
        except Ended as error:
            if error.limit == "closed":
                raise
            talk.stop = error.limit
            return None
        except TooLong:
            talk.stop = "max_length"
            return None
        if completion.finish == "aborted":
            talk.stop = "aborted"
            return None
        return completion

    def _next(self, prior_ids: np.ndarray, completion: Completion, talk: "_Talk") -> np.ndarray:
        """Returns the next prompt: the exact ids so far with the environment's messages, or all messages rendered anew where the
        template requires it."""
        found = self.rendering.bridge(prior_ids, completion.finish, talk.said, talk.task.tools)
        return self.rendering.opening(talk.task, talk.history) if found is None else found


@dataclass(eq=False)
class _Talk:
    """The state of a dialogue.

    Attributes:
      task: the task.
      said: the messages of the last observation.
      history: all messages after the task's.
      longest: most tokens of a prompt and its completion together.
      stop: why the dialogue ended; "" while it goes on.
    """

    task: Task
    said: Sequence[Message] = ()
    history: list[Message] = field(default_factory=list)
    longest: int = 0
    turns: int = 0
    sampled: int = 0
    left_out: int = 0
    stop: str = ""
    rewards: list[float] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    info: dict[str, Any] = field(default_factory=dict)

    def act(self, action: Action, tokens: int) -> None:
        """Records a turn of the policy."""
        self.turns += 1
        self.sampled += tokens
        self.calls.update(call.status for call in action.calls)
        self.history.append(of_action(action))

    def begin(self, observation: Observation) -> None:
        """Records the observation of a reset."""
        if observation.appended:
            more, gone = shortened({"role": "user", "content": observation.appended}, self.task.limits.most_text)
            self.left_out += gone
            if self.task.prompt.messages is None:  # plain text goes on without roles
                observation = replace(observation, messages=[more, *observation.messages])
            else:
                *before, last = self.task.messages
                joined = {**last, "content": content(last.get("content")) + more["content"]}
                self.task = replace(self.task, messages=[*before, joined])
        self.hear(observation)

    def hear(self, observation: Observation) -> None:
        """Records an observation of the environment; long texts are cut in their middle."""
        cut = [shortened(message, self.task.limits.most_text) for message in observation.messages]
        self.said = [message for message, _ in cut]
        self.left_out += sum(gone for _, gone in cut)
        self.history += self.said
        self.info |= observation.info
        if observation.reward is not None:
            self.rewards.append(float(observation.reward))
        if observation.done:
            self.stop = "done"
        elif self.turns >= self.task.limits.max_turns:
            self.stop = "max_turns"

    def ending(self) -> Ending:
        """Returns the ending with its rewards and counts."""
        counts: Mapping[str, Any] = {"turns": self.turns, "calls": dict(self.calls), "text/left_out": self.left_out}
        rewards = {"reward": sum(self.rewards)} if self.rewards else {}
        return Ending(rewards=rewards, stop=self.stop, info={**self.info, **counts})
