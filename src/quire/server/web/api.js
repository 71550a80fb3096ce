// What the page asks of the server: every request carries the key, which this tab alone keeps.

const KEY = "quire-key";

export const getKey = () => sessionStorage.getItem(KEY) ?? "";
export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

/** What the server said of a request it refused. `param`: the field to blame, or null. */
export class Refusal extends Error {
  constructor(message, status, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** The response to a GET, or to a POST where there is a `body`. Throws `Refusal`. */
export async function ask(path, body = null, signal = null) {
  const headers = {};
  if (getKey()) headers.authorization = `Bearer ${getKey()}`;
  if (body) headers["content-type"] = "application/json";
  const method = body ? "POST" : "GET";
  const url = new URL(path, document.baseURI);
  const reply = await fetch(url, { method, headers, signal, body: body && JSON.stringify(body) });
  if (reply.ok) return reply;
  const said = (await reply.json().catch(() => ({}))).error ?? {};
  throw new Refusal(said.message ?? `the server answered ${reply.status}`, reply.status, said.param);
}

/** The JSON of each server-sent event. Throws `Refusal` for an error among them, and where [DONE] is missing. */
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Refusal("the stream broke off", 0);
    const whole = (rest + value).split("\n\n");
    rest = whole.pop();
    for (const event of whole) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const found = JSON.parse(data);
      if (found.error) throw new Refusal(found.error.message, 0, found.error.param);
      yield found;
    }
  }
}
