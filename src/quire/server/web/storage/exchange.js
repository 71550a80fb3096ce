// Chats as files: JSON that can be read again, and Markdown for people.

import { Conversation } from "../chat/conversation.js";
import { newId } from "./store.js";

const FORMAT = "quire-chats";
const ROLES = ["user", "assistant", "tool"];

/** Records as the text of a file. */
export const asJson = (records) => JSON.stringify({ format: FORMAT, version: 1, chats: records }, null, 1);

/** A record as Markdown: the branches that are shown. */
export function asMarkdown(record) {
  const letters = record.lanes.length > 1 ? ["A", "B"] : [""];
  const parts = record.lanes.flatMap(({ tree, model, settings }, i) => [
    ...(letters[i] ? [`## Answer ${letters[i]}: ${model}`] : []),
    ...(settings?.system ? [`**System prompt**\n\n${settings.system}`] : []),
    ...new Conversation(tree).path.map(section),
  ]);
  return `# ${record.title}\n\n${parts.join("\n\n")}\n`;
}

function section(node) {
  const name = { user: "You", assistant: node.model || "Answer", tool: `Result of ${node.name}` }[node.role];
  const images = (node.images ?? []).map((url) => `![Image](${url})`);
  const thought = node.reasoning ? [`<details><summary>Reasoning</summary>\n\n${node.reasoning}\n\n</details>`] : [];
  const calls = (node.calls ?? []).map((call) => `Calls \`${call.name}\`:\n\n\`\`\`json\n${call.arguments}\n\`\`\``);
  return [`**${name}**`, ...images, ...thought, node.text, ...calls].filter(Boolean).join("\n\n");
}

/** The records of a file that `asJson` made, or that holds one list of `messages`. Throws where it is neither. */
export function fromJson(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Error(`the file is not JSON: ${error.message}`);
  }
  if (Array.isArray(found?.messages)) return [ofMessages(found)];
  if (found?.format !== FORMAT || !Array.isArray(found.chats)) {
    throw new Error(`the file has neither "format": "${FORMAT}" nor a list of "messages"`);
  }
  return found.chats.map(checked);
}

const text = (value, otherwise = "") => (typeof value === "string" ? value : otherwise);
const number = (value, otherwise = null) => (Number.isFinite(value) ? value : otherwise);

/** A record that the page can show whatever the file held. It gets an id of its own, so that nothing is overwritten. */
function checked(record, place) {
  const lanes = Array.isArray(record?.lanes) ? record.lanes.slice(0, 2) : [];
  if (!lanes.length) throw new Error(`chat ${place + 1} of the file has no messages`);
  return {
    id: newId(),
    title: text(record.title, "Imported chat"),
    named: true,
    created: number(record.created, Date.now()),
    updated: number(record.updated, Date.now()),
    compare: lanes.length > 1 && record.compare === true,
    lanes: lanes.map((lane) => ({ model: text(lane?.model), settings: settings(lane?.settings), tree: tree(lane?.tree) })),
  };
}

function settings(found) {
  const known = Object.entries(found ?? {}).filter(([, value]) => ["string", "boolean"].includes(typeof value));
  return Object.fromEntries(known);
}

function tree(found) {
  const nodes = (Array.isArray(found?.nodes) ? found.nodes : [])
    .filter((node) => Number.isInteger(node?.id) && node.id > 0 && ROLES.includes(node.role))
    .map(message);
  const ids = new Set(nodes.map((node) => node.id));
  // A parent comes before its children, so that no circle can be read.
  const whole = nodes.filter((node) => node.parent === null || (ids.has(node.parent) && node.parent < node.id));
  const known = new Map(whole.map((node) => [node.id, node]));
  const chosen = Object.entries(found?.chosen ?? {}).filter(([parent, id]) => (
    known.has(id) && String(known.get(id).parent ?? "root") === parent));
  return { nodes: whole, chosen: Object.fromEntries(chosen) };
}

function message(node) {
  const found = { id: node.id, parent: Number.isInteger(node.parent) ? node.parent : null, role: node.role, text: text(node.text) };
  if (Array.isArray(node.images)) found.images = node.images.filter((url) => /^data:image\//.test(url));
  for (const name of ["reasoning", "model", "reason", "error", "name", "call"]) {
    if (typeof node[name] === "string") found[name] = node[name];
  }
  if (Array.isArray(node.calls)) {
    found.calls = node.calls.map((call) => ({ id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments) }));
  }
  if (typeof node.measured === "string") found.measured = node.measured;
  if (node.json === true) found.json = true;
  return found;
}

function ofMessages({ messages, title, model }) {
  const conversation = new Conversation();
  const system = messages.find((said) => said?.role === "system");
  let last = null;
  for (const said of messages) {
    if (ROLES.includes(said?.role)) last = conversation.add(last, { role: said.role, ...contents(said.content) });
  }
  const lane = { model: text(model), settings: system ? { system: contents(system.content).text } : {}, tree: conversation.state };
  const now = Date.now();
  return { id: newId(), title: text(title, "Imported chat"), named: true, created: now, updated: now, lanes: [lane] };
}

function contents(content) {
  const parts = Array.isArray(content) ? content : [{ type: "text", text: text(content) }];
  const images = parts.map((part) => text(part?.image_url?.url)).filter((url) => /^data:image\//.test(url));
  return { text: parts.map((part) => text(part?.text)).join(""), ...(images.length ? { images } : {}) };
}

/** Have the browser save a text as a file. */
export function save(name, content, kind) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A title as the name of a file. */
export const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 50) || "chat";
