"""An agent as a program: asks the policy once, by the variables that the SDKs of OpenAI read, and says what the answer is worth."""

import asyncio
import json
import os
import subprocess
import sys

import aiohttp


async def ask(task: dict) -> dict:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = {"model": os.environ["OPENAI_MODEL"], "messages": task["messages"]}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=body) as answer:
            return (await answer.json())["choices"][0]["message"]


def main() -> None:
    how, task = sys.argv[1], json.load(sys.stdin)
    message = asyncio.run(ask(task))
    right = task["reference"] in message["content"]
    open(os.path.join(task["folder"], "scratch"), "w").close()
    if how == "fails":
        print("it has no time today", file=sys.stderr)
        sys.exit(3)
    if how in ("hangs", "leaves"):
        # One that leaves the group and the session of this program, as daemons do.
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        with open(sys.argv[2], "w") as file:
            file.write(str(left.pid))
    if how == "hangs":
        left.wait()
    print("a line that is no result")
    rewards = {"knows": {"right": right}, "wrong": {"right": "very"}}.get(how, {"right": right, "unknown": None})
    print(json.dumps({"rewards": rewards, "info": {"seed": task["seed"], "columns": task["columns"]}}))


if __name__ == "__main__":
    main()
