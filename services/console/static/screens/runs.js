// All runs that the console knows.

import { get } from "../lib/api.js";
import { fill, h } from "../lib/dom.js";
import { clock, duration, fixed, integer } from "../lib/format.js";
import { bindRows } from "../lib/keys.js";
import { badge, empty, loading, sortRows, table, usedColumns } from "../lib/parts.js";
import { link } from "../lib/route.js";

const COLUMNS = [
  { name: "name", title: "Run", value: (run) => run.name ?? run.id, cell: (run) => h("a", { href: link(run.id, "overview"), "data-row": true }, run.name ?? run.id) },
  { name: "state", title: "State", value: (run) => run.state, cell: (run) => badge(run.state) },
  { name: "step", title: "Step", numeric: true, value: (run) => run.step, cell: (run) => integer(run.step) },
  { name: "reward", title: "Reward", numeric: true, value: (run) => run.reward, cell: (run) => fixed(run.reward) },
  { name: "best_heldout", title: "Best held-out", numeric: true, value: (run) => run.best_heldout, cell: (run) => fixed(run.best_heldout) },
  { name: "started", title: "Started", numeric: true, value: (run) => run.started, cell: (run) => clock(run.started) },
  { name: "took", title: "Took", about: "While it ran, in all its lives", numeric: true, value: (run) => run.seconds, cell: (run) => duration(run.seconds) },
  { name: "note", title: "Note", wide: true, value: (run) => run.note, cell: (run) => run.note || "–" },
  { name: "model", title: "Model", value: (run) => run.model, cell: (run) => h("span", { title: run.model }, endOf(run.model)) },
  { name: "algorithm", title: "Algorithm", value: (run) => run.algorithm, cell: (run) => run.algorithm ?? "–" },
];

/** The end of a path; a name as it is. */
function endOf(model) {
  return model?.startsWith("/") ? `…/${model.split("/").slice(-2).join("/")}` : model ?? "–";
}

/** The list of runs; two of them can be laid over each other in the curves. */
export async function showRuns({ main, signal, query, setQuery }) {
  const place = h("div");
  const filter = h("input", { type: "search", size: 32, value: query.text ?? "", placeholder: "Filter by name, note or #tag", "aria-label": "Filter runs", oninput: (event) => {
    setQuery({ text: event.target.value });
    draw();
  } });
  fill(main, h("h1", {}, "Runs"), h("div", { class: "bar" }, filter), place);
  const { runs } = await loading(place, "Reading runs", () => get(["runs"], {}, { signal }));
  bindRows(main, signal);
  const draw = () => {
    const sorted = { name: query.sort ?? "started", down: query.down !== "0" };
    const onSort = (name) => {
      setQuery({ sort: name, down: sorted.name === name && sorted.down ? "0" : "1" });
      draw();
    };
    const wanted = (query.text ?? "").toLowerCase();
    const shown = runs.filter((run) => `${run.name ?? run.id} ${run.note}`.toLowerCase().includes(wanted));
    fill(place, shown.length ? table("Runs", usedColumns(COLUMNS, runs), sortRows(shown, COLUMNS, sorted), { sorted, onSort }) : empty(runs.length ? "No run like this." : "No run yet. Start one with seamflow train."));
  };
  draw();
}
