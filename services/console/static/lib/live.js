// What the run reports while this page is seen: one event stream, closed while it is hidden.

import { isBundle } from "./api.js";

const TYPES = ["step", "status", "rollout"];

/** The event stream of one run. */
export class LiveRun {
  constructor(onState) {
    this.onState = onState;
    this.handlers = new Map();
    document.addEventListener("visibilitychange", () => this.update());
  }

  /** Follow a run, or none. */
  follow(run) {
    if (run === this.run) return;
    this.close();
    this.run = run;
    this.wasOpen = false;
    this.update();
  }

  /** Call `handler(data)` for each event of a type until `signal` is aborted. */
  on(type, handler, signal) {
    const handlers = this.handlers.get(type) ?? new Set();
    this.handlers.set(type, handlers.add(handler));
    signal?.addEventListener("abort", () => handlers.delete(handler));
  }

  update() {
    if (document.hidden || this.run === null || this.run === undefined || isBundle()) this.close();
    else if (!this.source) this.open();
  }

  open() {
    this.source = new EventSource(`api/runs/${encodeURIComponent(this.run)}/events`);
    this.source.addEventListener("open", () => this.opened());
    this.source.addEventListener("error", () => this.onState("offline"));
    for (const type of TYPES) this.source.addEventListener(type, (event) => this.pass(type, JSON.parse(event.data)));
  }

  /** After a gap the screen reads anew what it may have missed. */
  opened() {
    this.onState("live");
    if (this.wasOpen) this.pass("status", {});
    this.wasOpen = true;
  }

  pass(type, data) {
    for (const handler of this.handlers.get(type) ?? []) handler(data);
  }

  close() {
    this.source?.close();
    this.source = null;
    this.onState("still");
  }
}
