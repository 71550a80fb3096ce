// What this browser keeps: chats and presets, in IndexedDB; in this page alone where the browser refuses that.

const NAME = "quire";
const KEYS = { chats: "id", presets: "name" };

export class Store {
  constructor() {
    this.kept = true;
    this.memory = Object.fromEntries(Object.keys(KEYS).map((name) => [name, new Map()]));
    this.opening = open().catch(() => {
      this.kept = false;
      return null;
    });
  }

  /** Every record of `kind`. */
  async all(kind) {
    const base = await this.opening;
    if (!base) return [...this.memory[kind].values()];
    return settled(base.transaction(kind).objectStore(kind).getAll());
  }

  async get(kind, key) {
    const base = await this.opening;
    return base ? settled(base.transaction(kind).objectStore(kind).get(key)) : this.memory[kind].get(key);
  }

  /** Keep a record under its key. Throws where the browser has no room. */
  async put(kind, record) {
    const base = await this.opening;
    if (!base) return this.memory[kind].set(record[KEYS[kind]], structuredClone(record));
    return settled(base.transaction(kind, "readwrite").objectStore(kind).put(record));
  }

  async remove(kind, key) {
    const base = await this.opening;
    if (!base) return this.memory[kind].delete(key);
    return settled(base.transaction(kind, "readwrite").objectStore(kind).delete(key));
  }
}

function open() {
  const asked = indexedDB.open(NAME, 1);
  asked.onupgradeneeded = () => {
    for (const [name, keyPath] of Object.entries(KEYS)) asked.result.createObjectStore(name, { keyPath });
  };
  return settled(asked);
}

function settled(request) {
  return new Promise((done, failed) => {
    request.onsuccess = () => done(request.result);
    request.onerror = () => failed(request.error);
  });
}

/** A key for a record that nothing else has. */
export function newId() {
  // randomUUID is there only where the page came by https or from this machine.
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return Date.now().toString(36) + [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
