// Formulas in LaTeX, to MathML that the browser draws. What is not known here is shown as it is written.

import { el } from "../dom.js";
import { ACCENTS, ALPHABETS, BELOW, BLANKS, FENCES, FUNCTIONS, INTEGRALS, LARGE, LETTERS, LIMITED, OPERATORS } from "./symbols.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const DEPTH = 40;
const LONGEST = 4000; // characters
const TOKEN = /\\[A-Za-z]+\*?|\\[\s\S]|\s+|[\s\S]/gu;
const MATRICES = { matrix: "", pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", smallmatrix: "", array: "", cases: "{" };
const ALIGNED = new Set(["aligned", "align", "align*", "split", "gathered", "gather", "gather*", "equation", "equation*", "alignat", "eqnarray"]);
const NEGATED = { "=": "≠", "∈": "∉", "∃": "∄", "⊂": "⊄", "≡": "≢", "<": "≮", ">": "≯", "∼": "≁", "≈": "≉" };

function m(tag, facts = {}, ...children) {
  const node = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(facts)) if (value !== null) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A formula as an element; `display`: it stands alone. What cannot be read is shown as code. */
export function formula(source, display = false) {
  try {
    const reader = new Reader(source, display);
    const row = reader.row(() => false);
    return m("math", { display: display ? "block" : null, alttext: source.trim() }, row);
  } catch (error) {
    if (!(error instanceof Unreadable)) throw error;
    return el("code", { class: "formula", title: error.message }, source.trim());
  }
}

class Unreadable extends Error {}

const alone = (nodes) => (nodes.length === 1 ? nodes[0] : m("mrow", {}, ...nodes));

class Reader {
  constructor(source, display) {
    if (source.length > LONGEST) throw new Unreadable("the formula is too long");
    this.tokens = source.match(TOKEN) ?? [];
    this.at = 0;
    this.display = display;
    this.depth = 0;
  }

  get next() {
    return this.tokens[this.at];
  }

  blank() {
    while (/^\s/.test(this.next ?? "")) this.at += 1;
  }

  take() {
    this.blank();
    if (this.at >= this.tokens.length) throw new Unreadable("the formula breaks off");
    return this.tokens[this.at++];
  }

  expect(token) {
    const found = this.take();
    if (found !== token) throw new Unreadable(`${token} is missing before ${found}`);
  }

  /** Everything until `ends(token)`, which is left. */
  row(ends) {
    if ((this.depth += 1) > DEPTH) throw new Unreadable("the formula is too deep");
    const nodes = [];
    for (this.blank(); this.at < this.tokens.length && !ends(this.next); this.blank()) {
      if (this.next === "}" || this.next === "&") throw new Unreadable(`${this.next} stands alone`);
      nodes.push(this.scripted(this.atom()));
    }
    this.depth -= 1;
    return alone(nodes);
  }

  group() {
    const found = this.row((token) => token === "}");
    this.expect("}");
    return found;
  }

  /** What a command takes: a group, or one character. */
  argument() {
    const token = this.take();
    if (token === "{") return this.group();
    return this.ofToken(token);
  }

  /** The characters of a group as they are written. */
  raw() {
    this.blank();
    if (this.next !== "{") return this.take();
    this.at += 1;
    let found = "";
    for (let open = 1; ; this.at += 1) {
      if (this.at >= this.tokens.length) throw new Unreadable("} is missing");
      if (this.next === "{") open += 1;
      if (this.next === "}" && (open -= 1) === 0) break;
      found += this.next;
    }
    this.at += 1;
    return found;
  }

  atom() {
    const token = this.take();
    if (!/\d/.test(token)) return this.ofToken(token);
    let number = token;
    while (/^[\d.]$/.test(this.next ?? "") && !(this.next === "." && !/\d/.test(this.tokens[this.at + 1] ?? ""))) number += this.tokens[this.at++];
    return m("mn", {}, number);
  }

  ofToken(token) {
    if (token === "{") return this.group();
    if (token.startsWith("\\")) return this.command(token.slice(1));
    if (token === "^" || token === "_") {
      this.at -= 1;
      return m("mrow");
    }
    if (token === "$") throw new Unreadable("$ stands in the formula");
    if (token === "'") return m("mo", {}, "′");
    if (/\d/.test(token)) return m("mn", {}, token);
    if (/\p{L}/u.test(token)) return m("mi", {}, token);
    if (token === "~") return m("mspace", { width: "0.33em" });
    return m("mo", "()[]|".includes(token) ? { stretchy: "false" } : {}, token === "-" ? "−" : token === "*" ? "∗" : token);
  }

  /** `base` with what is raised and lowered. */
  scripted(base) {
    const found = {};
    for (this.blank(); "^_'".includes(this.next ?? " "); this.blank()) {
      const sign = this.take();
      if (sign === "'") {
        let marks = "′";
        while (this.next === "'") marks += (this.at += 1, "′");
        found["^"] = found["^"] ? m("mrow", {}, m("mo", {}, marks), found["^"]) : m("mo", {}, marks);
        continue;
      }
      const script = this.argument();
      found[sign] = found[sign] ? m("mrow", {}, found[sign], script) : script;
    }
    const [up, down] = [found["^"], found._];
    if (!up && !down) return base;
    const limits = base.limits === "always" || (base.limits && this.display);
    if (up && down) return m(limits ? "munderover" : "msubsup", {}, base, down, up);
    if (up) return m(limits ? "mover" : "msup", {}, base, up);
    return m(limits ? "munder" : "msub", {}, base, down);
  }

  command(name) {
    if (name in COMMANDS) return COMMANDS[name](this);
    if (LETTERS.has(name)) return m("mi", { mathvariant: /^[A-Z]/.test(name) ? "normal" : null }, LETTERS.get(name));
    if (OPERATORS.has(name)) return m("mo", {}, OPERATORS.get(name));
    if (LARGE.has(name)) return limited(m("mo", {}, LARGE.get(name)));
    if (INTEGRALS.has(name)) return m("mo", {}, INTEGRALS.get(name));
    if (FUNCTIONS.has(name)) return m("mi", { mathvariant: "normal" }, name);
    if (LIMITED.has(name)) return limited(m("mo", { movablelimits: "false" }, name.replace(/^(arg|lim)(?=.)/, "$1 ")));
    if (FENCES.has(name)) return m("mo", { stretchy: "false" }, FENCES.get(name));
    if (name in ACCENTS) return this.accent(...ACCENTS[name]);
    if (name in BELOW) return this.below(BELOW[name]);
    if (name in BLANKS) return m("mspace", { width: `${BLANKS[name]}em` });
    if (name in ALPHABETS) return this.lettered(ALPHABETS[name]);
    if (/^[{}%$#&_|]$/.test(name)) return m("mo", { stretchy: "false" }, name === "|" ? "‖" : name);
    throw new Unreadable(`\\${name} is not known here`);
  }

  accent(sign, grows) {
    const node = m("mover", { accent: "true" }, this.argument(), m("mo", { stretchy: String(grows) }, sign));
    if (sign === "⏞") node.limits = "always";
    return node;
  }

  below(sign) {
    const node = m("munder", {}, this.argument(), m("mo", { stretchy: "true" }, sign));
    if (sign === "⏟") node.limits = "always";
    return node;
  }

  lettered([capital, small, digit, exceptions]) {
    const written = [...this.raw()].map((sign) => {
      if (exceptions[sign]) return exceptions[sign];
      const code = sign.codePointAt(0);
      if (/[A-Z]/.test(sign)) return String.fromCodePoint(capital + code - 65);
      if (/[a-z]/.test(sign)) return String.fromCodePoint(small + code - 97);
      return /\d/.test(sign) && digit ? String.fromCodePoint(digit + code - 48) : sign;
    }).join("");
    if (!written.includes("\\")) return m("mi", { mathvariant: "normal" }, written);
    return new Reader(written, this.display).row(() => false); // as \mathbf{\alpha}: the letters as they are
  }

  fence() {
    const token = this.take();
    if (token === ".") return "";
    if (!token.startsWith("\\")) return token === "<" ? "⟨" : token === ">" ? "⟩" : token;
    const name = token.slice(1);
    if (FENCES.has(name)) return FENCES.get(name);
    return name === "|" ? "‖" : name;
  }

  fenced() {
    const side = (sign) => (sign ? [m("mo", { fence: "true", stretchy: "true" }, sign)] : []);
    const open = this.fence();
    const parts = [];
    for (;;) {
      parts.push(this.row((token) => token === "\\right" || token === "\\middle"));
      if (this.take() === "\\right") break;
      parts.push(...side(this.fence()));
    }
    return m("mrow", {}, ...side(open), ...parts, ...side(this.fence()));
  }

  environment() {
    const name = this.raw();
    if (!(name in MATRICES) && !ALIGNED.has(name)) throw new Unreadable(`\\begin{${name}} is not known here`);
    if (name === "array" || name === "alignat") this.raw();
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(this.row((token) => ["&", "\\\\", "\\end"].includes(token)));
      const token = this.take();
      if (token === "\\end") break;
      if (token === "\\\\") rows.push([]);
    }
    this.raw();
    if (rows.length > 1 && rows.at(-1).length === 1 && !rows.at(-1)[0].hasChildNodes()) rows.pop();
    const kind = ALIGNED.has(name) ? "aligned" : name;
    const grid = m("mtable", { class: kind === "aligned" || kind === "cases" ? kind : "matrix", displaystyle: kind === "aligned" ? "true" : null },
      ...rows.map((cells) => m("mtr", {}, ...cells.map((cell) => m("mtd", {}, cell)))));
    const [open, close] = MATRICES[name] ?? "";
    const side = (sign) => (sign ? [m("mo", { fence: "true", stretchy: "true" }, sign)] : []);
    return m("mrow", {}, ...side(open), grid, ...side(close));
  }
}

function limited(node) {
  node.limits = true;
  return node;
}

const fraction = (style = null) => (reader) => m("mfrac", { displaystyle: style }, reader.argument(), reader.argument());
const nothing = () => m("mrow");
const text = (reader) => m("mtext", {}, reader.raw().replace(/^ | $/g, "\u00a0"));
const upright = (reader) => m("mi", { mathvariant: "normal" }, reader.raw().replace(/\\[,;: ]/g, " "));

const COMMANDS = {
  frac: fraction(), tfrac: fraction("false"), dfrac: fraction("true"), cfrac: fraction("true"),
  binom: (reader) => m("mrow", {}, m("mo", {}, "("), m("mfrac", { linethickness: "0" }, reader.argument(), reader.argument()), m("mo", {}, ")")),
  sqrt(reader) {
    reader.blank();
    if (reader.next !== "[") return m("msqrt", {}, reader.argument());
    reader.at += 1;
    const index = reader.row((token) => token === "]");
    reader.expect("]");
    return m("mroot", {}, reader.argument(), index);
  },
  left: (reader) => reader.fenced(),
  begin: (reader) => reader.environment(),
  text, textbf: text, textit: text, textrm: text, texttt: text, mbox: text,
  mathrm: upright, mathit: upright, mathnormal: upright,
  operatorname: upright,
  "operatorname*": (reader) => limited(upright(reader)),
  overset(reader) {
    const above = reader.argument();
    return m("mover", {}, reader.argument(), above);
  },
  underset(reader) {
    const under = reader.argument();
    return m("munder", {}, reader.argument(), under);
  },
  not(reader) {
    const node = reader.argument();
    node.textContent = NEGATED[node.textContent] ?? `${node.textContent}\u0338`;
    return node;
  },
  boxed: (reader) => m("mrow", { class: "boxed" }, reader.argument()),
  pmod: (reader) => m("mrow", {}, m("mo", {}, "("), m("mi", { mathvariant: "normal" }, "mod"), m("mspace", { width: "0.3em" }), reader.argument(), m("mo", {}, ")")),
  bmod: () => m("mo", { lspace: "0.25em", rspace: "0.25em" }, "mod"),
  mod: () => m("mo", { lspace: "1em", rspace: "0.3em" }, "mod"),
  displaystyle: nothing, textstyle: nothing, limits: nothing, nolimits: nothing, nonumber: nothing, notag: nothing,
  tag: (reader) => m("mtext", {}, `\u2003(${reader.raw()})`),
};
for (const size of ["big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr", "Biggl", "Biggr"]) {
  COMMANDS[size] = (reader) => m("mo", { stretchy: "true" }, reader.fence());
}
