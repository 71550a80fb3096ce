// A conversation as a tree of messages: whatever is edited or asked again is a branch beside what was there.

import { contentOf } from "./images.js";

const ROOT = "root";

/** A message: {id, parent, role: user | assistant | tool, text, ...}. Ids are whole numbers; `parent` is null for the first. */
export class Conversation {
  /** `state`: what `state` of another gave. */
  constructor({ nodes = [], chosen = {} } = {}) {
    this.nodes = new Map(nodes.map((node) => [node.id, node]));
    this.chosen = { ...chosen };
    this.last = Math.max(0, ...this.nodes.keys());
  }

  /** What can be stored and read again. */
  get state() {
    return { nodes: [...this.nodes.values()], chosen: this.chosen };
  }

  get empty() {
    return this.nodes.size === 0;
  }

  /** The messages of the branch that is shown, oldest first. */
  get path() {
    const found = [];
    for (let node = this.next(null); node; node = this.next(node.id)) found.push(node);
    return found;
  }

  next(parent) {
    return this.nodes.get(this.chosen[parent ?? ROOT]);
  }

  /** Messages from the first to `node`. */
  until(node) {
    const found = [];
    for (let at = node; at; at = this.nodes.get(at.parent)) found.unshift(at);
    return found;
  }

  /** Add a message behind `parent` (null: the first of all), and show its branch. */
  add(parent, message) {
    const node = { ...message, id: this.last += 1, parent: parent?.id ?? null };
    this.nodes.set(node.id, node);
    this.choose(node);
    return node;
  }

  choose(node) {
    this.chosen[node.parent ?? ROOT] = node.id;
  }

  /** Messages that stand where `node` stands, in the order in which they came. */
  branches(node) {
    return [...this.nodes.values()].filter((other) => other.parent === node.parent);
  }

  /** Show the branch `step` places further. */
  turn(node, step) {
    const all = this.branches(node);
    const to = all[all.indexOf(node) + step];
    if (to) this.choose(to);
  }

  /** Remove a message that nothing stands behind. */
  drop(node) {
    this.nodes.delete(node.id);
    const others = this.branches(node);
    if (others.length) this.choose(others.at(-1));
    else delete this.chosen[node.parent ?? ROOT];
  }
}

/** Messages as a request has them. A question whose answer failed before it said anything is left out with it. */
export function requestMessages(path, system) {
  const found = path.flatMap((node, i) => {
    if (node.role === "user" && i < path.length - 1 && silent(path[i + 1])) return [];
    return silent(node) ? [] : [asSent(node)];
  });
  return system ? [{ role: "system", content: system }, ...found] : found;
}

/** Whether an answer has neither text nor calls. */
export const silent = (node) => node.role === "assistant" && !node.text && !node.calls?.length;

function asSent(node) {
  if (node.role === "user") return { role: "user", content: contentOf(node.text, node.images ?? []) };
  if (node.role === "tool") return { role: "tool", tool_call_id: node.call, content: node.text };
  const calls = (node.calls ?? []).map(({ id, name, arguments: words }) => (
    { id, type: "function", function: { name, arguments: words } }));
  return calls.length
    ? { role: "assistant", content: node.text || null, tool_calls: calls }
    : { role: "assistant", content: node.text };
}

/** A title for a conversation: how its first question begins. */
export function titleOf(conversation) {
  const first = conversation.path.find((node) => node.role === "user");
  if (!first) return "New chat";
  const line = first.text.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line || "Images";
}
