// What a JSON schema says: its type in a few words, its fields, and an example that a server takes.

const PREFIX = "#/components/schemas/";
const EXAMPLES = {
  messages: [{ role: "user", content: "Say hello in one short sentence." }],
  prompt: "Once upon a time",
  inputs: "Once upon a time",
  input: "What is a KV cache?",
  source_sentence: "a cat",
  sentences: ["a kitten", "a car"],
  text: "A text.",
  text_1: "a cat",
  text_2: ["a kitten", "a car"],
  query: "small animals",
  documents: ["a kitten", "a car"],
  content: "Hello",
  tokens: [1, 2, 3],
  max_tokens: 32,
  lora_name: "my-adapter",
  lora_path: "/path/to/adapter",
};
const WITH_LENGTH = ["max_tokens", "max_output_tokens", "n_predict"];
const NOT_NEEDED = new Set(["Refused", "Ignored"]);

export class Schemas {
  constructor(known) {
    this.known = known;
  }

  /** A schema without references at its top, and the name of what it referred to. */
  resolve(schema) {
    const name = schema?.$ref?.startsWith(PREFIX) ? schema.$ref.slice(PREFIX.length) : null;
    return name ? { name, schema: this.known[name] ?? {} } : { name: null, schema: schema ?? {} };
  }

  /** The kinds that a body or a reply may be of: [{name, schema}]. */
  kinds(schema) {
    if (schema?.anyOf && schema.anyOf.every((one) => one.$ref)) return schema.anyOf.map((one) => this.resolve(one));
    return schema ? [this.resolve(schema)] : [];
  }

  /** A type in words, as "list of Message" or "number, 0 to 2". */
  type(schema) {
    const { name, schema: found } = this.resolve(schema);
    if (name) return name;
    if (found.anyOf) return found.anyOf.filter((one) => one.type !== "null").map((one) => this.type(one)).join(" or ") || "null";
    if (found.enum) return found.enum.map((value) => JSON.stringify(value)).join(", ");
    if ("const" in found) return JSON.stringify(found.const);
    if (found.type === "array") return found.items ? `list of ${this.type(found.items)}` : "list";
    if (found.type === "object") return typeof found.additionalProperties === "object" ? `object of ${this.type(found.additionalProperties)}` : "object";
    return `${found.type ?? "any JSON"}${range(found)}`;
  }

  /** Names of the schemas that a field refers to. */
  referred(schema) {
    if (schema?.$ref) return [this.resolve(schema).name];
    return [...(schema?.anyOf ?? []), ...(schema?.items ? [schema.items] : [])].flatMap((one) => this.referred(one));
  }

  /** Fields of an object: [{name, type, required, initial, text, state, inner}]; `state`: "Refused", "Ignored" or "". */
  fields(schema) {
    const required = new Set(schema.required ?? []);
    return Object.entries(schema.properties ?? {}).map(([name, own]) => {
      const [, state, text] = /^(?:(Refused|Ignored): )?([^]*)$/.exec(own.description ?? "");
      return {
        name,
        type: this.type(own),
        required: required.has(name),
        initial: own.default === undefined || own.default === null ? null : JSON.stringify(own.default),
        text,
        state: state ?? "",
        inner: this.referred(own),
      };
    });
  }

  /** A body that the server takes, with what is required and what most people set. */
  example(schema, model) {
    const found = {};
    const properties = schema.properties ?? {};
    if (properties.model && model) found.model = model;
    for (const [name, own] of Object.entries(properties)) {
      if (NOT_NEEDED.has((own.description ?? "").split(":")[0])) continue;
      const wanted = (schema.required ?? []).includes(name) || name === "messages" || name === "prompt" || name === "input";
      const fields = this.resolve(own).schema.properties;
      if (wanted && !(name in found)) found[name] = (fields ? null : EXAMPLES[name]) ?? this.value(own);
    }
    const length = WITH_LENGTH.find((name) => name in properties);
    if (length) found[length] = EXAMPLES.max_tokens;
    return found;
  }

  /** A value of a type. */
  value(own) {
    const { schema } = this.resolve(own);
    if (schema.anyOf) return this.value(schema.anyOf[0]);
    if (schema.enum) return schema.enum[0];
    if ("const" in schema) return schema.const;
    if (schema.properties) return this.example(schema, null);
    return { string: "text", integer: schema.minimum ?? 1, number: schema.minimum ?? 1, boolean: false, array: [], object: {} }[schema.type] ?? null;
  }

  /** What an operation is found by. */
  words({ path, verb, facts }) {
    const bodies = this.kinds(facts.requestBody?.content["application/json"]?.schema);
    const names = bodies.flatMap(({ schema }) => Object.keys(schema.properties ?? {}));
    return [verb, path, facts.summary, ...(facts.tags ?? []), ...names].join(" ").toLowerCase();
  }
}

function range({ minimum, maximum, exclusiveMinimum, exclusiveMaximum }) {
  const least = exclusiveMinimum ?? minimum;
  const most = exclusiveMaximum ?? maximum;
  const low = exclusiveMinimum === undefined ? "at least" : "above";
  const high = exclusiveMaximum === undefined ? "at most" : "below";
  const whole = (value) => (Math.abs(value) > 1e15 ? value.toPrecision(3) : String(value));
  if (least === undefined && most === undefined) return "";
  if (exclusiveMinimum === undefined && exclusiveMaximum === undefined && least !== undefined && most !== undefined) return `, ${whole(least)} to ${whole(most)}`;
  return `, ${[least === undefined ? "" : `${low} ${whole(least)}`, most === undefined ? "" : `${high} ${whole(most)}`].filter(Boolean).join(" and ")}`;
}
