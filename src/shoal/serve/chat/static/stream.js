// Server-sent events from a fetch: `data:` lines to objects, whatever the borders of the chunks are.

export class Events {
  #rest = "";

  feed(text) {
    const parts = (this.#rest + text).split("\n\n");
    this.#rest = parts.pop();
    return parts.filter((part) => part.startsWith("data: ")).map((part) => JSON.parse(part.slice(6)));
  }
}

export async function* read(response) {
  const events = new Events();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    yield* events.feed(value);
  }
}
