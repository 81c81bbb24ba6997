// Answers of the server; an error shows in the page and is thrown.

const problem = document.getElementById("problem");

export async function ask(name, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  let answer;
  try {
    answer = await fetch(`/api/${name}?${new URLSearchParams(given)}`);
  } catch {
    return fail("The server does not answer: is it still running?");
  }
  const found = await answer.json().catch(() => ({ error: `The server answered ${answer.status}.` }));
  if (!answer.ok) return fail(found.error);
  problem.hidden = true;
  return found;
}

function fail(message) {
  problem.textContent = message;
  problem.hidden = false;
  throw new Error(message);
}
