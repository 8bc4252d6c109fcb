// Asking the coordinator. An answer that is the same as before comes from the browser's cache, by its ETag.

export class Missing extends Error {}

export async function ask(path, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, v]) => v !== null && v !== undefined && v !== ""));
  const answer = await fetch(query.size ? `${path}?${query}` : path);
  if (answer.status === 404) throw new Missing((await answer.text()).trim());
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${(await answer.text()).trim().slice(0, 200)}`);
  return answer.json();
}

// The same, or `otherwise` where this coordinator does not have such a thing, or does not answer.
export async function askOr(otherwise, path, parameters) {
  try {
    return await ask(path, parameters);
  } catch (e) {
    if (!(e instanceof Missing)) console.info(e.message);
    return otherwise;
  }
}
