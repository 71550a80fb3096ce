// The arrows between messages that stand in the same place.

import { el } from "../dom.js";

export class BranchArrows {
  /** `turn(step)`: show the branch before (-1) or behind (1). */
  constructor(turn) {
    this.place = el("span", { class: "place" });
    const arrow = (name, sign, step) => el("button", { type: "button", class: "small quiet", "aria-label": name, click: () => turn(step) }, sign);
    this.back = arrow("Previous version", "‹", -1);
    this.on = arrow("Next version", "›", 1);
    this.root = el("span", { class: "branches", role: "group", "aria-label": "Versions", hidden: true }, this.back, this.place, this.on);
  }

  /** `place`: from 0, of `count`. */
  show(place, count) {
    this.root.hidden = count < 2;
    this.place.textContent = `${place + 1} / ${count}`;
    this.back.disabled = place === 0;
    this.on.disabled = place === count - 1;
  }
}
