// Writes zod3.json and zod4.json: JSON schemas of models of zod, a line each, as tools give them to servers.
// npm install zod@4 zod3@npm:zod@3 zod-to-json-schema && node zod.mjs FOLDER
import { writeFileSync } from "node:fs";
import { z as z4 } from "zod";
import { z as z3 } from "zod3";
import { zodToJsonSchema } from "zod-to-json-schema";

const shared = (z) => {
  const kinds = z.enum(["red", "green", "blue"]);
  const user = z.object({ name: z.string(), age: z.number().int().optional() });
  const node = z.object({ value: z.number(), get children() { return z.array(node); } });
  const tree = z.lazy(() => z.object({ value: z.string(), left: tree.optional(), right: tree.optional() }));
  return {
    string: z.string(), min: z.string().min(3), max: z.string().max(5), length: z.string().length(4),
    between: z.string().min(2).max(8), email: z.string().email(), url: z.string().url(), uuid: z.string().uuid(),
    cuid: z.string().cuid(), cuid2: z.string().cuid2(), ulid: z.string().ulid(), nanoid: z.string().nanoid(),
    emoji: z.string().emoji(), regex: z.string().regex(/^[a-z]+-\d{2,4}$/), anyCase: z.string().regex(/^[A-F]{3}$/),
    starts: z.string().startsWith("ab"), ends: z.string().endsWith("yz"), includes: z.string().includes("mid"),
    password: z.string().regex(/^(?=.*[A-Z])(?=.*\d).{8,}$/), noSpace: z.string().regex(/^(?!\s*$).+/),
    slug: z.string().regex(/^(?!-)[a-z0-9-]+$/), notAdmin: z.string().regex(/^(?!admin$)[a-z]+$/),
    backReference: z.string().regex(/^([a-z])\1$/), boundary: z.string().regex(/\bcat\b/),
    datetime: z.string().datetime(), offset: z.string().datetime({ offset: true }), date: z.string().date(),
    time: z.string().time(), duration: z.string().duration(), base64: z.string().base64(), jwt: z.string().jwt(),
    cidr: z.string().cidr ? z.string().cidr({ version: "v4" }) : z.cidrv4(), ipv4: z.string().ip ? z.string().ip({ version: "v4" }) : z.ipv4(),
    trimmed: z.string().trim(), lower: z.string().toLowerCase(), described: z.string().describe("what it is"),
    number: z.number(), int: z.number().int(), positive: z.number().positive(), negative: z.number().negative(),
    nonnegative: z.number().nonnegative(), range: z.number().min(-5).max(5), multiple: z.number().multipleOf(5),
    step: z.number().multipleOf(0.25), finite: z.number().finite(), safe: z.number().int().min(0).max(255),
    boolean: z.boolean(), nothing: z.null(), any: z.any(), unknown: z.unknown(), literal: z.literal("on"),
    literalNumber: z.literal(7), literalTrue: z.literal(true), kinds, native: z.nativeEnum({ A: "a", B: "b" }),
    numeric: z.nativeEnum({ One: 1, Two: 2 }), array: z.array(z.string()), some: z.array(z.number()).min(1).max(3),
    nonempty: z.array(z.boolean()).nonempty(), exactly: z.array(z.number().int()).length(2), nested: z.array(z.array(kinds)),
    pair: z.tuple([z.string(), z.number()]), open: z.tuple([z.string()]).rest(z.number()),
    object: z.object({ a: z.string(), b: z.number() }), optional: z.object({ a: z.string().optional() }),
    nullable: z.object({ a: z.string().nullable() }), nullish: z.object({ a: z.number().nullish() }),
    fallback: z.object({ a: z.string().default("x"), b: z.number().default(3) }), strict: z.object({ a: z.string() }).strict(),
    passthrough: z.object({ a: z.string() }).passthrough(), rest: z.object({ a: z.string() }).catchall(z.string()),
    partial: user.partial(), required: user.required(), picked: user.pick({ name: true }), omitted: user.omit({ age: true }),
    extended: user.extend({ tags: z.array(z.string()) }), deep: z.object({ a: z.object({ b: z.object({ c: kinds }) }) }),
    union: z.union([z.string(), z.number()]), objects: z.union([user, z.object({ id: z.number() })]),
    tagged: z.discriminatedUnion("type", [
      z.object({ type: z.literal("a"), x: z.number() }), z.object({ type: z.literal("b"), y: z.string() }),
    ]),
    taggedDefault: z.union([
      z.object({ kind: z.literal("cat").default("cat"), lives: z.number().int() }),
      z.object({ kind: z.literal("dog").default("dog"), tricks: z.array(z.string()) }),
    ]),
    both: z.intersection(z.object({ a: z.string() }), z.object({ b: z.number() })),
    and: user.and(z.object({ id: z.string().uuid() })), branded: z.string().brand("Id"), caught: z.string().catch("x"),
    refined: z.string().refine((s) => s.length > 2), readonly: z.array(z.string()).readonly(),
    never: z.object({ a: z.string(), b: z.never().optional() }), lazy: tree, recursive: node,
    event: z.object({
      id: z.string().uuid(), at: z.string().datetime(), kind: kinds, guests: z.array(z.object({
        name: z.string().min(1), email: z.string().email(), plusOne: z.boolean().optional(),
      })).min(1), place: z.object({ lat: z.number().min(-90).max(90), lng: z.number().min(-180).max(180) }).nullable(),
    }),
    invoice: z.object({
      number: z.string().regex(/^INV-\d{6}$/), currency: z.enum(["EUR", "USD"]), lines: z.array(z.object({
        sku: z.string(), quantity: z.number().int().positive(), price: z.number().nonnegative(),
      })), paid: z.boolean().default(false), due: z.string().date(),
    }),
  };
};
const only3 = (z) => ({
  record: z.record(z.number()), recordEnum: z.record(z.enum(["a", "b"]), z.number()), set: z.set(z.number()),
  setEnum: z.set(z.enum(["a", "b", "c"])), map: z.map(z.string(), z.number()), date: z.date(), bigint: z.bigint(),
  recordUuid: z.record(z.string().uuid(), z.string()), recordShort: z.record(z.string().min(1).max(4), z.boolean()),
  piped: z.string().pipe(z.string().min(1)), effect: z.preprocess((v) => v, z.number()), undef: z.object({ a: z.undefined() }),
});
const only4 = (z) => ({
  record: z.record(z.string(), z.number()), recordEnum: z.record(z.enum(["a", "b"]), z.number()),
  partialRecord: z.partialRecord(z.enum(["a", "b"]), z.string()), recordUuid: z.record(z.uuid(), z.string()),
  recordPattern: z.record(z.string().regex(/^x-/), z.string()), literals: z.literal(["a", 1, null]),
  template: z.templateLiteral(["v", z.int(), ".", z.int()]), int: z.int(), int32: z.int32(), uint32: z.uint32(),
  float32: z.float32(), float64: z.float64(), email: z.email(), url: z.url(), httpUrl: z.httpUrl(), guid: z.guid(),
  uuidv4: z.uuidv4(), ksuid: z.ksuid(), xid: z.xid(), ipv6: z.ipv6(), cidrv6: z.cidrv6(), base64url: z.base64url(),
  e164: z.e164(), hex: z.hex(), isoDate: z.iso.date(), isoTime: z.iso.time(), isoDatetime: z.iso.datetime(),
  isoDuration: z.iso.duration(), hostname: z.hostname(), looseObject: z.looseObject({ a: z.string() }),
  strictObject: z.strictObject({ a: z.string() }), stringbool: z.stringbool(), json: z.json(), file: z.object({ f: z.string().meta({ format: "binary" }) }),
  meta: z.object({ a: z.string().meta({ title: "A", examples: ["x"], deprecated: true }) }),
  nonoptional: z.object({ a: z.nonoptional(z.string().optional()) }), prefault: z.object({ a: z.string().prefault("x") }),
});

const write = (folder, name, models, convert) => {
  const lines = [];
  for (const [key, make] of Object.entries(models)) {
    try {
      lines.push(JSON.stringify([key, convert(make)]));
    } catch (error) {
      console.error(name, key, String(error).slice(0, 80));
    }
  }
  writeFileSync(`${folder}/${name}.jsonl`, lines.join("\n") + "\n");
  console.log(name, lines.length);
};
const folder = process.argv[2];
write(folder, "zod3", { ...shared(z3), ...only3(z3) }, (model) => zodToJsonSchema(model));
write(folder, "zod4", { ...shared(z4), ...only4(z4) }, (model) => z4.toJSONSchema(model, { io: "input" }));
