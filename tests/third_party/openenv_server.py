"""A server of OpenEnv with a guessing game, or with a tool: python openenv_server.py {guess,tools} PORT."""

import random
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, highest=7, **more):
        self.secret, self.guesses = random.Random(seed).randint(1, highest), 0
        return Hint(hint=f"Guess a number from 1 to {highest}.")

    def step(self, action, **more):
        if action.number == 13:
            raise RuntimeError("no such luck")
        self.guesses += 1
        right = action.number == self.secret
        hint = "right" if right else "higher" if action.number < self.secret else "lower"
        return Hint(hint=hint, done=right, reward=1.0 if right else -0.1)

    @property
    def state(self):
        return State(step_count=self.guesses)


class Tooled(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("tooled")

        @server.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        super().__init__(server)

    def reset(self, seed=None, **more):
        return Observation()

    def _step_impl(self, action, **more):
        raise RuntimeError("calls alone")

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    kinds = {"guess": (Game, Guess, Hint), "tools": (Tooled, CallToolAction, CallToolObservation)}
    app = create_fastapi_app(*kinds[sys.argv[1]], max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
