// Colours of code: comments, texts, numbers, words of the language and names that are called.

import { el } from "../dom.js";

const MOST = 50_000; // characters; longer code stays plain

const words = (text) => new Set(text.split(" "));

const C_WORDS = "auto break case catch class const constexpr continue default delete do else enum explicit export extends extern final finally for "
  + "friend goto if implements import inline instanceof interface namespace new noexcept operator override package private protected public "
  + "register return sizeof static struct super switch template this throw throws try typedef typename union using virtual void volatile while "
  + "int char float double long short signed unsigned bool boolean byte string var let function async await yield of in typeof from type "
  + "readonly abstract declare fn mut impl trait mod pub use match loop move ref dyn where crate self unsafe func chan defer go map range select "
  + "fallthrough val fun when object is";
const PYTHON_WORDS = "and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match "
  + "nonlocal not or pass raise return try while with yield self";
const SHELL_WORDS = "if then else elif fi for while until do done case esac in function return local export select time sudo cd echo exit set unset "
  + "source alias";
const SQL_WORDS = "select from where insert into values update set delete create table drop alter add join left right inner outer full on as and or not "
  + "null is in like between group by order having limit offset union all distinct case when then else end primary key foreign references index "
  + "view with recursive asc desc exists default constraint unique check";
const RUBY_WORDS = "begin break case class def do else elsif end ensure for if in module next not or and redo rescue retry return self super then "
  + "unless until when while yield require attr_accessor local function nil repeat";
const VALUES = words("true false null undefined nil None True False NaN Infinity nullptr");

const NUMBER = String.raw`\b(?:0[xX][\da-fA-F_]+|0[bB][01_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\w*`;
const DOUBLE = String.raw`"(?:\\[\s\S]|[^"\\\n])*"?`;
const SINGLE = String.raw`'(?:\\[\s\S]|[^'\\\n])*'?`;
const BACKTICK = String.raw`${"`"}(?:\\[\s\S]|[^${"`"}\\])*${"`"}?`;
const TRIPLE = String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)`;
const BLOCK = String.raw`/\*[\s\S]*?(?:\*/|$)`;
const WORD = String.raw`[A-Za-z_$][\w$]*`;

/** What is found in code of a kind, and which words it has. `fold`: capital letters mean the same. */
const kind = (comment, string, names, fold = false) => (
  { pattern: `(?<c>${comment})|(?<s>${string})|(?<n>${NUMBER})|(?<w>${WORD})`, names: words(names), fold });

const KINDS = {
  c: kind(String.raw`//[^\n]*|${BLOCK}|^[ \t]*#[ \t]*(?:include|define|if|ifdef|ifndef|endif|else|pragma)[^\n]*`, `${DOUBLE}|${SINGLE}|${BACKTICK}`, C_WORDS),
  python: kind(String.raw`#[^\n]*|^[ \t]*@[\w.]+`, String.raw`\b[rRbBfFuU]{0,2}(?:${TRIPLE}|${DOUBLE}|${SINGLE})|${TRIPLE}|${DOUBLE}|${SINGLE}`, PYTHON_WORDS),
  shell: kind(String.raw`(?<![\w$\\])#[^\n]*`, String.raw`"(?:\\[\s\S]|[^"\\])*"?|'[^']*'?`, SHELL_WORDS),
  sql: kind(String.raw`--[^\n]*|${BLOCK}`, `${DOUBLE}|'[^']*'?`, SQL_WORDS, true),
  ruby: kind(String.raw`#[^\n]*|--[^\n]*`, `${DOUBLE}|${SINGLE}`, RUBY_WORDS),
  data: kind(String.raw`(?<![\w:/])#[^\n]*|//[^\n]*`, `${DOUBLE}|${SINGLE}`, ""),
  markup: { pattern: String.raw`(?<c><!--[\s\S]*?(?:-->|$))|(?<k></?[A-Za-z][\w:-]*|/?>)|(?<s>${DOUBLE}|'[^'<]*')`, names: new Set() },
};

const LANGUAGES = {
  c: "c cpp c++ h hpp cc cuda java javascript js jsx typescript ts tsx mjs go golang rust rs swift kotlin kt scala csharp cs c# php dart css scss",
  python: "python py python3 pycon ipython",
  shell: "bash sh shell zsh console terminal dockerfile makefile powershell fish",
  sql: "sql sqlite postgresql mysql",
  ruby: "ruby rb lua elixir perl r julia",
  data: "json jsonc json5 yaml yml toml ini conf properties",
  markup: "html xml svg xhtml vue",
};

const KIND_OF = new Map(Object.entries(LANGUAGES).flatMap(([name, list]) => list.split(" ").map((language) => [language, name])));

/** Code as nodes: texts, and spans of the class `hl-` with a letter (k: word, s: text, c: comment, n: number, f: function). */
export function highlighted(text, language) {
  const found = KINDS[KIND_OF.get(language.toLowerCase())];
  if (!found || text.length > MOST) return [text];
  const nodes = [];
  let plain = 0;
  for (const match of text.matchAll(new RegExp(found.pattern, "gm"))) {
    const letter = letterOf(match, found, text);
    if (!letter || !match[0]) continue;
    if (match.index > plain) nodes.push(text.slice(plain, match.index));
    nodes.push(el("span", { class: `hl-${letter}` }, match[0]));
    plain = match.index + match[0].length;
  }
  nodes.push(text.slice(plain));
  return nodes;
}

function letterOf({ 0: piece, index, groups }, { names, fold }, text) {
  if (groups.c !== undefined) return "c";
  if (groups.s !== undefined) return "s";
  if (groups.n !== undefined) return "n";
  if (groups.k !== undefined) return "k";
  if (names.has(fold ? piece.toLowerCase() : piece)) return "k";
  if (VALUES.has(piece)) return "n";
  return text[index + piece.length] === "(" ? "f" : null;
}
