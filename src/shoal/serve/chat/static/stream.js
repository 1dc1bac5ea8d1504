// Parse the server-sent events of a response, wherever the chunks are cut.

export class EventParser {
  #rest = "";

  feed(text) {
    const parts = (this.#rest + text).split("\n\n");
    this.#rest = parts.pop();
    return parts.filter((part) => part.startsWith("data: ")).map((part) => JSON.parse(part.slice(6)));
  }
}

export async function* readEvents(response) {
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    yield* parser.feed(value);
  }
}
