// What is wrong, as the server says it: the worst in a sentence on top, and all of it with what to do.

import { byId, el } from "./dom.js";

const duration = (seconds) => (seconds < 100 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`);

/** Show a reply of /dashboard/diagnosis. */
export function verdict(found) {
  const box = byId("verdict");
  const said = JSON.stringify(found);
  if (box.said === said && !box.hidden) return; // a live region that is written anew is read out anew
  box.said = said;
  box.hidden = false;
  box.className = found.level;
  byId("sentence").textContent = found.sentence;
  byId("findings").replaceChildren(...found.findings.map((one, i) => line(one, i)));
}

/** One that is wrong; the first one's text is the sentence already. */
function line(one, place) {
  const since = one.since === null ? "" : ` Since ${duration(one.since)}.`;
  const text = one.model ? `${one.model}: ${one.text}.` : `${one.text}.`;
  return el("li", { class: one.level }, place ? el("strong", {}, `${text} `) : null, `${one.advice}${since}`);
}
