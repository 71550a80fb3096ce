// What is looked at: kept in the address behind the #, so that a link shows the same.

export class State {
  constructor() {
    this.listeners = [];
    this.read();
    addEventListener("hashchange", () => {
      if (location.hash.slice(1) === this.written) return;
      this.read();
      for (const listener of this.listeners) listener(true);
    });
  }

  read() {
    this.parameters = new URLSearchParams(location.hash.slice(1));
    this.written = location.hash.slice(1);
  }

  /** Call `listener(whole)` on changes; `whole`: the address itself was changed. */
  watch(listener) {
    this.listeners.push(listener);
  }

  get(name, otherwise = "") {
    return this.parameters.get(name) ?? otherwise;
  }

  all(name) {
    return this.parameters.getAll(name);
  }

  /** Change some: null takes one out, a list gives it several values. `visit`: a step that Back undoes. */
  set(changes, visit = false) {
    for (const [name, value] of Object.entries(changes)) {
      this.parameters.delete(name);
      if (value === null || value === "") continue;
      for (const each of Array.isArray(value) ? value : [value]) this.parameters.append(name, each);
    }
    this.written = this.parameters.toString();
    history[visit ? "pushState" : "replaceState"](null, "", `#${this.written}`);
    for (const listener of this.listeners) listener(false);
  }
}
